"""What cannot be trained, saved, resumed or evaluated is found before the first step; all else is trained."""

import json
import multiprocessing
import re
from pathlib import Path

import numpy as np
import pytest
import torch

from benchmarks.faults import has_ended
from flyte_ddp.batch_share import BatchShare
from flyte_ddp.code.user_code import find_code
from flyte_ddp.engine.batches.splits import Resident
from flyte_ddp.engine.checks.trials import Network, Trials
from flyte_ddp.engine.job import job_in, make_subject
from flyte_ddp.engine.measures import augment
from flyte_ddp.errors import InputError, NonFiniteError
from flyte_ddp.events import Printed
from flyte_ddp.launch import launcher
from flyte_ddp.launch.environment import World
from flyte_ddp.launch.failures import RankError
from flyte_ddp.settings import RunOptions
from flyte_ddp.training import train
from tests.engine import (
    buffer_recipes,
    coupled_recipes,
    dataset_recipes,
    measure_recipes,
    probe_recipes,
    random_recipes,
    rank_recipes,
    routed_recipes,
)
from tests.engine.probe_recipes import SIZE, Settings, Sound

MODULES = (
    buffer_recipes, coupled_recipes, dataset_recipes, measure_recipes, probe_recipes, random_recipes, rank_recipes,
    routed_recipes,
)  # fmt: skip
CLASSES = {name: kind for module in MODULES for name, kind in vars(module).items() if isinstance(kind, type)}
FILES = rf"{re.escape(str(Path(__file__).parents[1]))}/\w+_recipes\.py"
REFUSED = {
    "ForwardByGenerator": ["ForwardByGenerator.forward", "something else each time", "numpy.random or random"],
    "LostNumber": ["LostNumber.forward", "something else each time", "count in a buffer"],
    "LostBuffer": ["LostBuffer.model", "forward changes the buffer 1.calls of Counted", "persistent=True"],
    "LateBuffer": ["LateBuffer.model", "forward creates the buffer 1.mask of Mask", "in its __init__"],
    "LateWeight": ["LateWeight.model", "creates or removes the weights 1.layer.bias, 1.layer.weight, ", "its __init__"],
    "LateWeightInEvaluation": ["LateWeightInEvaluation.model", "the weights 1.layer.bias, 1.layer.weight, of which"],
    "WidenedBuffer": ["WidenedBuffer.model", "creates the buffer 1.total of Widening", "of this shape and dtype"],
    "ExtraState": ["ExtraState.model", "must have nothing but tensors", "1._extra_state (dict)"],
    "ScaledTable": ["ScaledTable.forward", "changes weight of Embedding by the samples of its rank", "max_norm"],
    "CentredPredictions": ["CentredPredictions.predictions", "depend on the others of its batch", "all_gather()"],
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
    "NoisyTestSplit": ["NoisyTestSplit.data", 'split "test"', "FreshGenerator gives another sample each time"],
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
    "AugmentNothing": ["AugmentNothing.augment", "must return tensors of the same 8 samples"],
    "AugmentSums": ["AugmentSums.augment", "must return tensors of the same 8 samples"],
    "EveryoneInParts": ["micro_batch must be 0 for EveryoneInParts, which calls all_gather(), got 2: set it to 0"],
    "NotARecipe": ["must be a subclass of flyte_ddp.Recipe, or to train a function"],
}
BY_VIRTUAL_RANKS = {
    "EveryonesBuffer": ["EveryonesBuffer.forward", "all_gather() must be called in measure() alone"],
    "EveryoneInEvaluation": ["EveryoneInEvaluation.predictions", "all_gather() must be called in measure() alone"],
    "CountsEvaluations": ["CountsEvaluations.forward", "leave buffers as they are, and it changes 1.calls: change"],
    "ScaledRate": ["ScaledRate.optimizer", "must not depend on the rank or the number of ranks", "batch_size"],
    "ScaledSchedule": ["ScaledSchedule.lr_lambda", "must not depend on the rank or the number of ranks"],
    "VariableRate": ["VariableRate.optimizer", "must not depend on the rank or the number of ranks"],
    "MixedByReader": ["MixedByReader.data", "MixingReader.read_batch must return a sample as it is", "lengths(split)"],
    "Padded": ["Padded.data", "PaddingReader.read_batch must return a sample as it is"],
}
WITHOUT_LINE = {"Headline", "EveryoneInParts", "NotARecipe"}
SOUND = [
    "Sound",
    "EveryoneInEvaluation",
    "EveryonesBuffer",
    "SpectralNorm",
    "LateCache",
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
# Their results depend on the number of ranks, as with any DistributedDataParallel; not so by virtual ranks, each of
# which draws, normalises and compares samples by itself
BY_RANK = [
    "Transformer", "BatchNormInParts", "AugmentByNumpy", "MeanOfBatch", "Mixup", "Ranked", "Contrastive", "MeanOfRank",
    "NormalisedBackward", "ClampedByHook", "ClampedAfterwards", "CentredInEvaluation", "DropPath", "RandomLeakyReLU",
    "LSTM", "OneForTheBatch", "AugmentByTorch", "ForwardByPython", "RarelyLonger", "TurnedAlike", "TurnedEach",
    "Experts", "BorrowingAlone", "Everyone", "EveryoneInTest",
]  # fmt: skip
# Even by virtual ranks
NEVER_THE_SAME = ["ScaledRate", "ScaledSchedule", "MixedByReader", "Padded"]


def run(name, output, nproc=0, on_event=lambda event: None, workers=1, **settings):
    options = RunOptions(nproc=nproc, loader_workers=workers, tracking="off")
    return train(CLASSES[name], Settings(**settings), options, output=output, on_event=on_event)


def assert_refused(name, words, output, **settings):
    with pytest.raises(InputError) as caught:
        run(name, output, **settings)
    message = caught.value.message
    assert all(word in message for word in words), message
    assert name in WITHOUT_LINE or re.search(rf"{FILES}, line \d+", message), message
    assert multiprocessing.active_children() == []


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_trained_resumed_or_evaluated_is_refused(alone, tmp_path, name):
    assert_refused(name, REFUSED[name], tmp_path)


def test_what_was_read_before_must_not_matter_without_loader_workers_either(alone, tmp_path):
    words = ["its Ascending gives other samples after others were read: keep nothing"]
    assert_refused("AscendingDataset", words, tmp_path, workers=0)


@pytest.mark.kernels
@pytest.mark.parametrize("name", BY_VIRTUAL_RANKS)
def test_what_virtual_ranks_cannot_repeat_is_refused(alone, tmp_path, name):
    assert_refused(name, BY_VIRTUAL_RANKS[name], tmp_path, virtual_ranks=2)


@pytest.mark.kernels
@pytest.mark.parametrize("name", SOUND)
def test_what_is_sound_is_trained_without_a_word(alone, tmp_path, name):
    assert not [one for one in run(name, tmp_path).warnings if "guessing" not in one]


def trained(folder, names, virtual_ranks, counts):
    """By recipe, the results of trainings on each of these numbers of ranks."""
    asked = []
    for name in names:
        code = find_code(f"{CLASSES[name].__module__}:{name}")
        subject = make_subject(code, Settings(batch_size=10, virtual_ranks=virtual_ranks))
        for ranks in counts:
            place = folder / f"{name} {ranks}"
            place.mkdir(parents=True)
            asked.append((job_in(place, subject, RunOptions(loader_workers=0)), ranks))
    world = World(max(counts), max(counts), "gloo", "cpu")
    results = iter(launcher.launch("tests.engine.many_targets:train_each", world, asked, 120, lambda event: None)[0])
    return {name: [next(results) for _ in counts] for name in names}


@pytest.mark.slow
def test_what_depends_on_the_number_of_ranks_is_trained_on_two(tmp_path):
    for name, (result,) in trained(tmp_path, [*BY_RANK, *NEVER_THE_SAME], 0, [2]).items():
        assert np.isfinite(result.tested["loss"]), name


@pytest.mark.kernels
@pytest.mark.parametrize("names", [BY_RANK[:3], pytest.param(BY_RANK[3:], marks=pytest.mark.slow)])
def test_by_virtual_ranks_it_has_the_same_bits_on_any_number_of_ranks(tmp_path, names):
    """The last batch of twelve samples has two, for four parts."""
    for name, (one, *others) in trained(tmp_path, names, 4, [1, 3]).items():
        for other in others:
            assert (other.digest, other.tested) == (one.digest, one.tested), name


def test_a_loss_that_no_sample_counts_for_is_told_once(alone, tmp_path):
    told = [warning for warning in run("Ignored", tmp_path, epochs=2).warnings if "add up to 0" in warning]
    assert [warning.partition(":")[0] for warning in told] == [
        "no sample of the test split counts for the loss after epoch 1"
    ]


def test_a_transform_that_changes_a_batch_alike_is_named_and_trained(alone, tmp_path):
    found = [run("TurnedAlike", tmp_path / name).warnings for name in ("one", "other")]
    assert found[0] == found[1]
    (warning,) = (one for one in found[0] if "alike" in one)
    assert re.search(rf"{FILES}, line \d+: torchvision's RandomAffine changes all samples of a batch alike", warning)
    assert not [one for one in run("TurnedEach", tmp_path / "each").warnings if "alike" in one]


def test_what_torch_draws_in_augment_depends_on_the_step_and_the_part_alone():
    found: list[torch.Tensor] = []
    for seed, part in ((7, 0), (7, 0), (8, 0), (7, 1)):
        torch.rand(seed + len(found))
        share = BatchShare(count=SIZE, part=part)
        found.append(augment(CLASSES["TurnedByOne"](Settings()), torch.ones(SIZE, 2), seed, share))
    assert torch.equal(found[0], found[1])
    assert not any(torch.equal(found[0], other) for other in found[2:])


def test_what_drops_layers_by_pythons_random_numbers_counts_as_drawing():
    """Otherwise a single seed would be tried, in which all layers may be used."""
    for name, has_drawn in (("ForwardByPython", True), ("Sound", False)):
        recipe = CLASSES[name](Settings())
        split = Resident(recipe.data("train"), torch.device("cpu"))
        assert Trials(recipe, Network(recipe.model()), split, torch.arange(4))().has_drawn is has_drawn


def test_draws_of_another_seed_are_nothing_to_compare_with():
    """Of a split of one sample, each trial is one of all samples."""
    recipe = CLASSES["Sound"](Settings())
    split = Resident(recipe.data("train")[:1], torch.device("cpu"))
    trials = Trials(recipe, Network(recipe.model()), split, torch.arange(1))
    first = trials()
    trials(0, 1, seed=1)
    assert trials.whole is first


@pytest.mark.parametrize("name", ["NaNWeights", "InfiniteWeights", "NaNParameter"])
def test_weights_of_loss_or_network_that_are_not_finite_end_the_run(alone, tmp_path, name):
    with pytest.raises(NonFiniteError, match="loss is not finite in epoch 1, step 1, on rank 0"):
        run(name, tmp_path)


def test_every_recipe_of_the_modules_is_tested():
    recipes = {name for name, kind in CLASSES.items() if issubclass(kind, Sound)}
    assert recipes - {*REFUSED, *BY_VIRTUAL_RANKS, *SOUND, *BY_RANK, *NEVER_THE_SAME} == {
        "OneRankRaises", "ProcessInMeasure", "Chatty", "Unseeded", "Borrowing", "TurnedByOne", "NaNWeights",
        "InfiniteWeights", "NaNParameter", "Ignored",
        "OfDataset",  # from which others derive
        "AscendingDataset",  # read without loader workers
        "Scored",  # of tests/engine/checkpoints/test_warm_start.py
        # of tests/engine/test_validation.py
        "Overflowing", "OverflowingTest", "OverflowingValidation", "OverflowingTestAfterValidation", "BrokenScore",
        "BrokenScoreOfValidation",
    }  # fmt: skip


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
        ("ProcessInMeasure", ["ProcessInMeasure.measure", "each rank measures something else for the same samples"]),
        ("OneRankRaises", ["rank ", "ZeroDivisionError", "only where the share begins later"]),
    ],
)
def test_ranks_that_refuse_end_the_run_with_their_reason_and_leave_no_process(tmp_path, name, words):
    with pytest.raises((InputError, RankError)) as caught:
        run(name, tmp_path, nproc=2)
    first_line = str(caught.value).partition("\n")[0]
    assert all(word in first_line for word in words), first_line
    assert multiprocessing.active_children() == []


def test_ranks_without_a_sample_of_the_last_batch_borrow_one_that_counts_for_nothing(tmp_path, request):
    def trained(nproc):
        folder = tmp_path / f"{nproc}"
        result = run("Borrowing", folder, nproc, batch_size=SIZE - 2, test_batch_size=SIZE - 1, epochs=3)
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
        ("tests.engine.probe_recipe:Sound", "no module probe_recipe in"),
        ("tests.engine.probe_recipes:Soun", "defines no Soun at its top level"),
        ("probe_recipes.py", "name the module with dots and without .py"),
    ],
)
def test_a_name_that_is_not_there_is_refused_before_anything_starts(tmp_path, name, words):
    with pytest.raises(InputError, match=re.escape(words)):
        train(name, Settings(), output=tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_name_that_stars_do_not_import_is_refused(alone, tmp_path, monkeypatch):
    (tmp_path / "starred.py").write_text("from tests.engine.probe_recipes import *")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(InputError, match=r"^starred:Soun: starred has no Soun at its top level"):
        train("starred:Soun", Settings(), output=tmp_path / "out")


def test_misspelt_settings_are_refused():
    with pytest.raises(InputError, match=r"no field \"epoch\" \(did you mean epochs\?\)"):
        Settings.from_json(json.dumps({"epoch": 3}))
