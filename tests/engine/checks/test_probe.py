"""Every way in which a recipe's result would depend on the number of ranks is found before the first step."""

import json
import multiprocessing
import re
from pathlib import Path

import numpy as np
import pytest
import torch

from benchmarks.faults import has_ended
from flyte_ddp.batch_share import BatchShare
from flyte_ddp.engine.measures import augment
from flyte_ddp.errors import InputError, NonFiniteError
from flyte_ddp.events import Event, NotLearning, Printed
from flyte_ddp.launch.failures import RankError
from flyte_ddp.settings import RunOptions
from flyte_ddp.training import train
from tests.engine import (
    coupled_recipes,
    dataset_recipes,
    measure_recipes,
    probe_recipes,
    random_recipes,
    routed_recipes,
)
from tests.engine.probe_recipes import SIZE, Settings, Sound

MODULES = (coupled_recipes, dataset_recipes, measure_recipes, probe_recipes, random_recipes, routed_recipes)
CLASSES = {name: kind for module in MODULES for name, kind in vars(module).items() if isinstance(kind, type)}
FILES = rf"{re.escape(str(Path(__file__).parents[1]))}/\w+_recipes\.py"
REFUSED = {
    "RandomLeakyReLU": ["rrelu_with_noise", "let torch draw"],
    "AugmentByTorch": ["(randn)", "in augment() from its argument random"],
    "AugmentByNumpy": ["AugmentByNumpy.augment", "numpy's or Python's random numbers", "its argument random"],
    "ForwardByPython": ["ForwardByPython.forward", "numpy's or Python's random numbers"],
    "ForwardByGenerator": ["ForwardByGenerator.forward", "something else each time", "count in a buffer"],
    "DeepMean": ["DeepMean.forward", "depends on the others of its batch"],
    "MeanOfBatch": ["forward", "depends on the others of its batch", "all_gather()", "nn.BatchNorm"],
    "Mixup": ["Mixup.augment", "depends on the others of its batch", "mix no samples"],
    "Ranked": ["Ranked.measure", "'worst' (", "depends on the others of its batch"],
    "Contrastive": ["Contrastive.measure", "'loss' (", "to compare samples, call all_gather()"],
    "UndeclaredEveryone": ["uses_global_batch = True"],
    "EveryoneFromZero": ["EveryoneFromZero.measure", "'loss' (", "depends on the others"],
    "Buffer": ["the buffer 1.mean of RunningMean", "all_gather()"],
    "LostBuffer": ["LostBuffer.model", "forward changes the buffer 1.calls of Counted", "persistent=True"],
    "LateBuffer": ["LateBuffer.model", "forward creates the buffer 1.mask of Mask", "in its __init__"],
    "ExtraState": ["ExtraState.model", "must have nothing but tensors", "1._extra_state (dict)"],
    "Reentrant": ["Reentrant.forward", "use_reentrant=False", "activation_checkpointing"],
    "CheckpointedFirst": [
        "the network of CheckpointedFirst.model",
        "reaches the parameters 0.weight",
        "use_reentrant=False",
    ],
    "FreshGeneratorDataset": [
        'split "train" and split "test": its FreshGenerator gives another sample each time',
        "torch.randint(2**31, ()).item() to what else takes a seed",
        "in augment()",
    ],
    "OwnGeneratorDataset": ["self.steps[0]['rng'] = numpy.random.default_rng(torch.randint(2**31, ()).item())"],
    "OwnTransformDataset": ["begin with self.transform.set_random_seed(torch.randint(2**31, ()).item())"],
    "NoisyReaderDataset": ["its NoisyReader gives another sample each time: read_batch must not draw"],
    "KeptNoiseDataset": ["its KeptNoise gives other samples after others were read: keep nothing that was drawn"],
    "KeptSamplesDataset": ["its KeptSamples gives other samples after others were read", "default_rng(0)"],
    "WritableFileDataset": [
        "its WritableFile gives other samples where two loader workers read at once",
        "open it at first use in __getitem__, or set loader_workers to 0",
    ],
    "EmptyDataset": ["EmptyDataset.data", 'split "train"', "must have samples"],
    "NotANumber": ["NotANumber.data", "sample 5 has a NaN"],
    "Lengths": ["Lengths.data", "first dimension has to be the samples", "(12, 8), (13,)"],
    "Unused": ["Unused.forward", "spare.weight, spare.bias", "requires_grad_(False)"],
    "Detached": ["Detached.measure", "no gradient comes from 'loss'", "detach()"],
    "ScalarLoss": ["ScalarLoss.measure", "shape (8,), got ()", "reduction='none'"],
    "DerivedTensor": ["DerivedTensor.derive", "must return a dict of names and numbers: "],
    "DerivedAlone": ["DerivedAlone.derive", "must keep the loss", "got error"],
    "NoLoss": ["NoLoss.measure", 'must return a dict with "loss"', "['error']"],
    "Headline": ["Headline.headline must be one of loss, got 'acuracy': name one of them, or let measure()"],
    "AugmentDrops": ["AugmentDrops.augment", "must return tensors of the same 8 samples"],
    "TurnedEach": ["draws random numbers of its own (RandomAffine)", "let torch draw, in augment()"],
    "MicroBatchNorm": ["MicroBatchNorm.micro_batch must be 0", "nn.GroupNorm"],
    "MicroEveryone": ["MicroEveryone.micro_batch must be 0", "uses_global_batch"],
    "GroupedNormOfSteps": ["GroupedNormOfSteps.forward", "depends on the others", "in the order of the samples"],
    "GroupedNormOfSome": ["ghost_batch_size must be 0", "got 3 rows of 4 samples"],
    "NotARecipe": ["must be a subclass of flyte_ddp.Recipe, or to train a function"],
}
WITHOUT_LINE = {"Headline", "MicroBatchNorm", "MicroEveryone", "GroupedNormOfSome", "NotARecipe"}
SOUND = [
    "Sound",
    "FunctionalDropout",
    "RandnLike",
    "DropPath",
    "TorchvisionDropPath",
    "LSTM",
    "Transformer",
    "OneForTheBatch",
    "Everyone",
    "EveryonesBuffer",
    "Experts",
    "SpectralNorm",
    "LateCache",
    "GroupedNorm",
    "Deep",
    "SeededDataset",
    "NoisyDataset",
    "OpenFilesDataset",
    "OwnGeneratorSeededDataset",
    "OwnTransformSeededDataset",
    "Validated",
    "InPlace",
    "NotReentrant",
    "Forces",
    "ViewOfWeights",
    "Undirected",
]


def run(name, output, nproc=0, on_event=lambda event: None, **settings):
    options = RunOptions(nproc=nproc, loader_workers=1, tracking="off")
    return train(CLASSES[name], Settings(**settings), options, output=output, on_event=on_event)


@pytest.mark.parametrize("name", REFUSED)
def test_what_would_depend_on_the_number_of_ranks_or_cannot_be_trained_is_refused(alone, tmp_path, name):
    with pytest.raises(InputError) as caught:
        run(name, tmp_path)
    message = caught.value.message
    assert all(words in message for words in REFUSED[name]), message
    assert name in WITHOUT_LINE or re.search(rf"{FILES}, line \d+", message), message
    assert multiprocessing.active_children() == []


@pytest.mark.parametrize("name", SOUND)
def test_what_does_not_depend_on_it_passes(alone, tmp_path, name):
    assert not any("the number of ranks" in warning for warning in run(name, tmp_path).warnings)


def test_a_loss_that_no_sample_counts_for_is_told_once(alone, tmp_path):
    told = [warning for warning in run("Ignored", tmp_path, epochs=2).warnings if "add up to 0" in warning]
    assert [warning.partition(":")[0] for warning in told] == [
        "no sample of the test split counts for the loss after epoch 1"
    ]


def test_a_dataset_that_draws_is_the_only_reason(alone, tmp_path):
    with pytest.raises(InputError) as caught:
        run("FreshGeneratorDataset", tmp_path)
    assert "depends on the others" not in caught.value.message


def test_a_transform_that_changes_a_batch_alike_is_named_and_trained(alone, tmp_path):
    found = [run("TurnedAlike", tmp_path / name).warnings for name in ("one", "other")]
    assert found[0] == found[1]
    (warning,) = (one for one in found[0] if "alike" in one)
    assert re.search(rf"{FILES}, line \d+: torchvision's RandomAffine changes all samples of a batch alike", warning)


def test_what_is_drawn_for_a_batch_depends_on_its_position_alone():
    share = BatchShare(count=SIZE)
    found: list[torch.Tensor] = []
    for seed in (7, 7, 8):
        torch.rand(seed + len(found))
        found.append(augment(CLASSES["TurnedByOne"](Settings()), torch.ones(SIZE, 2), seed, share))
    assert torch.equal(found[0], found[1])
    assert not torch.equal(found[0], found[2])


@pytest.mark.parametrize("name", ["NaNWeights", "InfiniteWeights", "NaNParameter"])
def test_weights_of_loss_or_network_that_are_not_finite_end_the_run(alone, tmp_path, name):
    with pytest.raises(NonFiniteError, match="loss is not finite in epoch 1, step 1, on rank 0"):
        run(name, tmp_path)


def test_every_recipe_of_the_modules_is_tested():
    recipes = {name for name, kind in CLASSES.items() if issubclass(kind, Sound)}
    assert recipes - {*REFUSED, *SOUND} == {
        "Permitted", "OneRankRaises", "RarelyLonger", "RarelyLongerPart", "Chatty", "Unseeded", "Borrowing",
        "BorrowingGroups", "TurnedAlike", "TurnedByOne", "NaNWeights", "InfiniteWeights", "NaNParameter", "Ignored",
        "OfDataset",  # from which others derive
        # of tests/engine/test_validation.py
        "Overflowing", "OverflowingTest", "OverflowingValidation", "OverflowingTestAfterValidation", "BrokenScore",
        "BrokenScoreOfValidation",
    }  # fmt: skip


def test_a_recipe_can_let_it_pass_and_the_result_says_so(tmp_path):
    result = run("Permitted", tmp_path, nproc=2, stop_after=1, epochs=2)
    (warning,) = [one for one in result.warnings if "the result depends on the number of ranks" in one]
    assert re.search(FILES, warning)
    assert result.epochs[-1].test["loss"] > 0

    said: list[Event] = []
    first = tmp_path / "final-checkpoint"
    options = RunOptions(nproc=2, loader_workers=1, tracking="off")
    train(CLASSES["Permitted"], Settings(epochs=2), options, output=tmp_path / "on", init=first, on_event=said.append)
    assert warning in [one.reason for one in said if isinstance(one, NotLearning)]


@pytest.mark.parametrize(
    ("name", "words"),
    [
        (
            "Unseeded",
            [
                "Unseeded.data",
                f"{dataset_recipes.__file__}, line ",
                'split "test"',
                "gives each rank other samples",
                "default_rng(0)",
            ],
        ),
        ("RarelyLonger", ["epoch 1, step ", "samples, or", "had different shapes", "dropout (", "pad all samples"]),
        ("OneRankRaises", ["rank ", "ZeroDivisionError", "only where the share begins later"]),
    ],
)
def test_ranks_that_refuse_end_the_run_with_their_reason_and_leave_no_process(tmp_path, name, words):
    with pytest.raises((InputError, RankError)) as caught:
        run(name, tmp_path, nproc=2)
    first_line = str(caught.value).partition("\n")[0]
    assert all(word in first_line for word in words), first_line
    assert multiprocessing.active_children() == []


@pytest.mark.parametrize("nproc", [1, 2])
def test_parts_of_other_shapes_end_the_run_on_any_number_of_ranks(tmp_path, nproc):
    """All of an epoch is in one batch: micro_batch would change the result."""
    with pytest.raises(RankError, match=r"epoch 1, step 1, .* parts .* had different shapes .*dropout \("):
        run("RarelyLongerPart", tmp_path, nproc, batch_size=SIZE)


@pytest.mark.parametrize("name", ["Borrowing", "BorrowingGroups"])
def test_ranks_without_a_sample_of_the_last_batch_borrow_one_that_counts_for_nothing(tmp_path, request, name):
    def trained(nproc):
        folder = tmp_path / f"{nproc}"
        result = run(name, folder, nproc, batch_size=SIZE - 2, test_batch_size=SIZE - 1, epochs=3)
        weights = torch.load(result.model_path, weights_only=True)
        measures = [value for epoch in result.epochs for value in (epoch.train["loss"], epoch.test["loss"])]
        return [*weights.values(), np.load(folder / "predictions.npy"), np.array(measures)]

    of_three = trained(3)
    request.getfixturevalue("alone")
    for found, expected in zip(of_three, trained(1), strict=True):
        np.testing.assert_allclose(found, expected, rtol=1e-3, atol=1e-4)


def test_a_recipe_may_print_start_threads_and_processes_and_shuffle_by_numpy(tmp_path):
    events: list[object] = []
    run("Chatty", tmp_path, nproc=2, on_event=events.append)
    printed = {(event.rank, event.text) for event in events if isinstance(event, Printed)}
    children = {(rank, text) for rank, text in printed if text.startswith("child ")}
    assert printed - children == {(0, "a word on standard output"), (1, "a word on standard output")}
    assert multiprocessing.active_children() == []
    assert len(children) == 2 * 2 * 2  # ranks, splits, children
    assert all(has_ended(int(text.split()[1])) for _, text in children)


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("tests.engine.probe_recipe:Sound", "did you mean probe_recipes?"),
        ("tests.engine.probe_recipes:Soun", "did you mean Sound?"),
        ("probe_recipes.py", "name the module with dots, without .py"),
    ],
)
def test_a_name_that_is_not_there_is_refused_before_anything_starts(tmp_path, name, words):
    with pytest.raises(InputError, match=re.escape(words)):
        train(name, Settings(), output=tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_name_that_stars_do_not_import_is_refused(alone, tmp_path, monkeypatch):
    (tmp_path / "starred.py").write_text("from tests.engine.probe_recipes import *")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(InputError, match=r"^starred:Soun: starred has no Soun \(did you mean Sound\?\) at its top lev"):
        train("starred:Soun", Settings(), output=tmp_path / "out")


def test_misspelt_settings_are_refused():
    with pytest.raises(InputError, match=r"no field \"epoch\" \(did you mean epochs\?\)"):
        Settings.from_json(json.dumps({"epoch": 3}))
