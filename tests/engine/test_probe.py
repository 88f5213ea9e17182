"""Every way in which a recipe's result would depend on the number of ranks is found before the first step."""

import json
import multiprocessing
import re
import signal
import socket
from pathlib import Path

import pytest
from torch import distributed

from flyte_ddp.errors import InputError
from flyte_ddp.events import Printed
from flyte_ddp.launch.failures import RankFailed
from flyte_ddp.settings import RunOptions
from flyte_ddp.training import train
from tests.engine import probe_recipes
from tests.engine.probe_recipes import Settings

FILE = str(Path(probe_recipes.__file__))
REFUSED = {
    "FunctionalDropout": ["draws random numbers of its own (", "use a layer nn.Dropout"],
    "RandnLike": ["randn_like", "in augment() from its argument random"],
    "DropPath": ["(rand)", "in augment() from its argument random"],
    "TorchvisionDropPath": ["bernoulli_", "use a layer nn.Dropout"],
    "RandomLeakyReLU": ["rrelu_with_noise", "let torch draw"],
    "LSTM": ["(LSTM)", "give LSTM no dropout, and put nn.Dropout between layers of one nn.LSTM each"],
    "AugmentByTorch": ["(randn)", "in augment() from its argument random"],
    "AugmentByNumpy": ["AugmentByNumpy.augment", "numpy's or Python's random numbers", "its argument random"],
    "ForwardByPython": ["ForwardByPython.forward", "numpy's or Python's random numbers"],
    "ForwardByGenerator": ["ForwardByGenerator.forward", "something else each time"],
    "MeanOfBatch": ["forward", "depends on the others of its batch", "everyone()", "nn.BatchNorm"],
    "Mixup": ["Mixup.augment", "depends on the others of its batch", "mix no samples"],
    "Ranked": ["Ranked.measure", "'worst' (", "depends on the others of its batch"],
    "Contrastive": ["Contrastive.measure", "'loss' (", "to compare samples, call everyone()"],
    "UndeclaredEveryone": ["couples_samples = True"],
    "EveryoneFromZero": ["EveryoneFromZero.measure", "'loss' (", "depends on the others"],
    "Buffer": ["the buffer 1.mean of RunningMean", "everyone()"],
    "NoisyDataset": ["NoisyDataset.data", "its NoisyRows gives another sample each time", "in augment()"],
    "RarelyNoisyDataset": ["its RarelyNoisyRows gives another sample each time"],
    "EmptyDataset": ["EmptyDataset.data", 'split "train"', "must have samples"],
    "NotANumber": ["NotANumber.data", "sample 5 has a NaN"],
    "Lengths": ["Lengths.data", "first dimension has to be the samples", "(12, 8), (13,)"],
    "Unused": ["Unused.forward", "spare.weight, spare.bias", "requires_grad_(False)"],
    "Detached": ["Detached.measure", "no gradient comes from 'loss'", "detach()"],
    "ScalarLoss": ["ScalarLoss.measure", "shape (4,), got ()", "reduction='none'"],
    "NoLoss": ["NoLoss.measure", 'must return a dict with "loss"', "['error']"],
    "Headline": ["Headline.headline must be one of loss, got 'acuracy'"],
    "AugmentDrops": ["AugmentDrops.augment", "must return tensors of the same 4 samples"],
    "MicroBatchNorm": ["MicroBatchNorm.micro_batch must be 0", "nn.GroupNorm"],
    "MicroEveryone": ["MicroEveryone.micro_batch must be 0", "couples_samples"],
    "NotARecipe": ["must be a subclass of flyte_ddp.recipe.Recipe"],
}
WITHOUT_LINE = {"Headline", "MicroBatchNorm", "MicroEveryone", "NotARecipe"}
SOUND = [
    "Sound",
    "LSTMWithout",
    "Transformer",
    "OneForTheBatch",
    "Everyone",
    "SpectralNorm",
    "SeededDataset",
    "Validated",
    "Undirected",
]


@pytest.fixture
def alone(monkeypatch):
    """This process as the only rank: what a launch has to do with is tested elsewhere."""
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port = str(found.getsockname()[1])
    for name, value in {"WORLD_SIZE": "1", "RANK": "0", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("MASTER_PORT", port)
    handlers = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    yield
    if distributed.is_initialized():  # a rank that fails ends without parting from the others
        distributed.destroy_process_group()
    for number, handler in handlers.items():
        signal.signal(number, handler)


def run(name, output, nproc=0, on_event=lambda event: None, **settings):
    options = RunOptions(nproc=nproc, loader_workers=1, tracking="off")
    where = f"tests.engine.probe_recipes:{name}"
    return train(where, Settings(**settings), options, output=output, on_event=on_event)


@pytest.mark.parametrize("name", REFUSED)
def test_what_would_depend_on_the_number_of_ranks_or_cannot_be_trained_is_refused(alone, tmp_path, name):
    with pytest.raises(InputError) as caught:
        run(name, tmp_path)
    message = caught.value.message
    assert all(words in message for words in REFUSED[name]), message
    assert name in WITHOUT_LINE or re.search(rf"{re.escape(FILE)}, line \d+", message), message
    assert multiprocessing.active_children() == []


@pytest.mark.parametrize("name", SOUND)
def test_what_does_not_depend_on_it_passes(alone, tmp_path, name):
    assert not any("the number of ranks" in warning for warning in run(name, tmp_path).warnings)


def test_every_recipe_of_the_module_is_tested():
    kinds = [kind for kind in vars(probe_recipes).values() if isinstance(kind, type)]
    recipes = {kind.__name__ for kind in kinds if issubclass(kind, probe_recipes.Sound)}
    assert recipes - {*REFUSED, *SOUND} == {
        "Permitted", "OneRankRaises", "Chatty", "Unseeded", "NeverEmpty"
    }  # fmt: skip


def test_a_recipe_can_let_it_pass_and_the_result_says_so(tmp_path):
    result = run("Permitted", tmp_path, nproc=2)
    (warning,) = result.warnings
    assert "the result depends on the number of ranks" in warning
    assert FILE in warning
    assert result.epochs[-1].test["loss"] > 0


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("FunctionalDropout", ["InputError", "draws random numbers of its own", f"{FILE}, line "]),
        ("Unseeded", ["Unseeded.data", "gives each rank other samples", "default_rng(0)"]),
        ("OneRankRaises", ["rank ", "ZeroDivisionError", "only where the share begins later"]),
        ("NeverEmpty", [f"{FILE}, line ", "without any sample of a short last batch"]),
    ],
)
def test_ranks_that_refuse_end_the_run_with_their_reason_and_leave_no_process(tmp_path, name, words):
    # the last batch has one sample
    with pytest.raises(RankFailed) as caught:
        run(name, tmp_path, nproc=2, test_batch_size=11)
    first_line = str(caught.value).partition("\n")[0]
    assert all(word in first_line for word in words), first_line
    assert multiprocessing.active_children() == []


def test_a_recipe_may_print_start_threads_and_shuffle_by_numpy(tmp_path):
    events: list[object] = []
    run("Chatty", tmp_path, nproc=2, on_event=events.append)
    printed = {(event.rank, event.text) for event in events if isinstance(event, Printed)}
    assert printed == {(0, "a word on standard output"), (1, "a word on standard output")}
    assert multiprocessing.active_children() == []


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


def test_misspelt_settings_are_refused():
    with pytest.raises(InputError, match=r"no field \"epoch\" \(did you mean epochs\?\)"):
        Settings.from_json(json.dumps({"epoch": 3}))
