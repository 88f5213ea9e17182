"""A SIGTERM in each phase of a training: what it costs is what it must, and the resume has the same bits."""

import os

import pytest
import torch

from flyte_ddp.events import Event, RunStarted
from flyte_ddp.launch.failures import PreemptedError
from flyte_ddp.settings import RunOptions, TrainingSettings
from flyte_ddp.training import train as train_here
from tests.commands import free_port, same
from tests.programs import run_on_two_nodes
from tests.small_training import identical

RECIPE = {
    "recipe": "tests.engine.notices:Noticed", "target": "tests.engine.notices:train", "epochs": 2,
    "validation_fraction": 0.2, "test_batch_size": 8, "ema_decay": 0.9,
}  # fmt: skip


@pytest.fixture
def notice(monkeypatch):
    """notice(phase): send one in this phase of the trainings from here on; notice("") sends none."""

    def choose(phase, rank=1):
        monkeypatch.setenv("DDP_TEST_PHASE", phase)
        monkeypatch.setenv("DDP_TEST_RANK", str(rank))
        monkeypatch.setenv("DDP_TEST_LAUNCHER", str(os.getpid()))

    return choose


@pytest.mark.parametrize(
    ("phase", "said", "begins"),
    [
        ("trial 2", "ended at once, before the first step", (0, 0)),
        ("step 7", "stopped on request before epoch 1, step 9$", (0, 8)),
        (
            "evaluation 3",
            "stopped on request in the evaluation after epoch 1, step 16, with which a resume begins$",
            (0, 16),
        ),
        ("evaluation 8", "stopped on request before epoch 2, step 1$", (1, 0)),
        ("evaluation 19", "stopped on request in the evaluation after epoch 2, with which a resume begins$", (2, 0)),
    ],
)
def test_a_recipe_obeys_a_notice_in_each_phase_and_resumes_with_the_same_bits(
    train, whole, notice, phase, said, begins
):
    expected = whole(2, **RECIPE)
    notice(phase)
    with pytest.raises(PreemptedError, match=f"^all ranks on .*: SIGTERM: {said}"):
        train(2, name="cut", **RECIPE)
    notice("")
    resumed = train(2, name="cut", **RECIPE)
    started = resumed.events[0]
    assert isinstance(started, RunStarted)
    assert (started.first_epoch, started.first_step) == begins
    assert identical(expected, resumed)


def test_a_notice_while_the_results_are_written_ends_the_training_whole(train, whole, notice):
    expected = whole(2, **RECIPE)
    notice("results 2", rank=0)
    assert identical(expected, train(2, **RECIPE))


OWN = {
    "target": "tests.engine.notices:train", "epochs": 2, "batch_size": 12, "test_batch_size": 4, "log_interval": 3,
    "keep_checkpoint": False,
}  # fmt: skip


@pytest.mark.parametrize(
    ("loop", "phase", "said", "begins"),
    [
        ("own_loop", "evaluation 3", "stopped on request in the evaluation after epoch 1, step 7, .*$", (0, 7)),
        ("own_loop", "evaluation 25", "stopped on request in the evaluation after epoch 2, .*$", (2, 0)),
        ("own_loop_that_swaps", "evaluation 3", "stopped on request before epoch 2, step 1$", (1, 0)),
    ],
)
def test_an_own_loop_obeys_a_notice_in_each_phase(train, whole, notice, loop, phase, said, begins):
    """With other weights than those of the last step, which no checkpoint could have, it evaluates to the end."""
    recipe = {"recipe": f"tests.engine.notices:{loop}", **OWN}
    expected = whole(2, **recipe)
    notice(phase)
    with pytest.raises(PreemptedError, match=f"^all ranks on .*: SIGTERM: {said}"):
        train(2, name="cut", **recipe)
    notice("")
    resumed = train(2, name="cut", **recipe)
    (started,) = [event for event in resumed.events if isinstance(event, RunStarted)]
    assert (started.first_epoch, started.first_step) == begins
    assert identical(expected, resumed)


def test_ranks_may_leave_an_evaluation_of_their_own_loop_after_other_batches(train):
    assert len(train(2, recipe="tests.engine.notices:own_loop_that_leaves", **OWN).result.epochs) == 2


ON_NODES = """
import os, sys
from flyte_ddp import RunOptions
from flyte_ddp.engine import joined
from flyte_ddp.launch.link import DirectLink
from flyte_ddp.settings import TrainingSettings
from flyte_ddp.training import train
from tests.engine import notices

class Link(DirectLink):
    def __init__(self, on_event):
        super().__init__(on_event)
        notices.LINKS.append(self)

joined.DirectLink = Link  # so that the notice is heard before the rank goes on
os.environ["DDP_TEST_LAUNCHER"] = str(os.getpid())
settings = TrainingSettings(epochs=2, batch_size=12, test_batch_size=4, log_interval=3, threads=1)
train("tests.engine.notices:own_loop", settings, RunOptions(), output=sys.argv[1])
"""
ON_ONE = TrainingSettings(epochs=2, batch_size=12, test_batch_size=4, log_interval=3, threads=1)


@pytest.mark.slow
def test_a_notice_on_one_of_two_nodes_ends_both(whole, tmp_path):
    """Its rank alone hears of it, in an evaluation. Two ranks of one node go on."""
    (tmp_path / "on_nodes.py").write_text(ON_NODES)
    said = run_on_two_nodes(
        tmp_path / "on_nodes.py", free_port(), str(tmp_path / "trained"), nodes=2 * [{"DDP_TEST_PHASE": "evaluation 3"}]
    )
    for node in said:
        assert "stopped on request in the evaluation after epoch 1, step 7, with which a resume begins" in node.error
    assert not (tmp_path / "trained" / "model.pt").exists()
    begun: list[Event] = []
    train_here(
        "tests.engine.notices:own_loop", ON_ONE, RunOptions(nproc=2), output=tmp_path / "trained", on_event=begun.append
    )
    (started,) = [event for event in begun if isinstance(event, RunStarted)]
    assert (started.first_epoch, started.first_step) == (0, 7)
    expected = whole(2, recipe="tests.engine.notices:own_loop", threads=1, **OWN)
    assert same(torch.load(tmp_path / "trained" / "model.pt", weights_only=True), expected.weights)
