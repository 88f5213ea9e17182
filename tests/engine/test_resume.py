"""A run that was cut off goes on, and ends as if it had not been."""

import shutil

import pytest
import torch

from flyte_ddp import training
from flyte_ddp.engine.checkpoints.checkpoint import read_checkpoint, write_checkpoint
from flyte_ddp.errors import InputError
from flyte_ddp.events import CheckpointRefused, EpochFinished, RunStarted, StepLogged
from flyte_ddp.settings import RunOptions
from tests.engine.probe_recipes import Settings, Validated
from tests.small_training import TWO_HOSTS, WORKER, Unplugged, differences, identical, relative_difference, unplug_at


@pytest.mark.parametrize(
    ("step", "target", "nproc"),
    [
        (1, WORKER, 2),
        (7, TWO_HOSTS, 2),
        (20, WORKER, 3),
    ],
)
def test_a_run_that_was_cut_off_goes_on_with_the_same_bits(train, whole, step, target, nproc):
    """On three ranks, too, among which the order of a sum matters."""
    expected = whole(nproc, epochs=2, log_interval=1)
    with pytest.raises(Unplugged):
        train(nproc, name="cut", epochs=2, log_interval=1, checkpoint_seconds=0, on_event=unplug_at(step))
    resumed = train(nproc, name="cut", epochs=2, log_interval=1, checkpoint_seconds=0, target=target)
    started = resumed.events[0]
    assert isinstance(started, RunStarted)
    assert started.first_step > 0 or step == 1  # the checkpoint of step 1 may not have been complete
    assert identical(expected, resumed)


def test_a_run_goes_on_in_the_precision_that_it_was_begun_in_whatever_auto_is_now(train, tmp_path):
    with pytest.raises(Unplugged):
        train(1, name="cut", precision="auto", log_interval=1, checkpoint_seconds=0, on_event=unplug_at(9))
    checkpoint = tmp_path / "cut" / "checkpoint"
    content = read_checkpoint(checkpoint, {})
    other = {"float32": "bfloat16", "bfloat16": "float32"}[content["state"]["precision"]]  # as from other hardware
    content["state"]["precision"] = other
    write_checkpoint(checkpoint, content)
    resumed = train(1, name="cut", precision="auto", log_interval=1)
    assert resumed.events[0].first_step > 0
    assert resumed.events[0].remarks == [f"precision: {other}, which the checkpoint has been trained in"]
    assert resumed.result.precision == other
    assert read_checkpoint(checkpoint, {})["state"]["precision"] == other


def test_a_cut_off_run_goes_on_with_another_number_of_ranks(train, whole):
    expected = whole(2, log_interval=1)
    with pytest.raises(Unplugged):
        train(2, name="cut", log_interval=1, checkpoint_seconds=0, on_event=unplug_at(9))
    resumed = train(3, name="cut", log_interval=1, checkpoint_seconds=0)
    assert resumed.events[0].first_step > 0
    # Rounding decides which of two nearly equal pixels a max-pooling takes; one that it takes the other way moves the
    # weights by 7e-4, and whether there is one depends on the step of the cut. The loss hardly notices.
    assert relative_difference(expected, resumed) < 5e-3
    (ours,), (theirs,) = resumed.result.epochs, expected.result.epochs
    assert ours.train["loss"] == pytest.approx(theirs.train["loss"], rel=1e-5)
    assert ours.test["accuracy"] == theirs.test["accuracy"]


def test_a_finished_training_resumes_to_the_same_result_without_a_step(train):
    whole = train(1)
    left = whole.folder / ".checkpoint.0123.partial"  # by a process that was killed while it saved
    left.touch()
    again = train(1)
    assert not left.exists()
    assert again.events[0].first_epoch == 1
    assert not any(isinstance(event, EpochFinished) for event in again.events)
    assert identical(whole, again)


@pytest.mark.parametrize("damage", ["flipped", "short", "empty"])
def test_an_unusable_checkpoint_is_refused_with_a_reason_and_training_starts_afresh(train, whole, tmp_path, damage):
    expected = whole(1, seed=5)
    checkpoint = shutil.copytree(expected.folder, tmp_path / "damaged") / "checkpoint"
    raw = bytearray(checkpoint.read_bytes())
    raw[len(raw) // 2] ^= 1
    checkpoint.write_bytes(bytes({"flipped": raw, "short": raw[:1000], "empty": b""}[damage]))
    again = train(1, name="damaged", seed=5)
    (refused,) = [event for event in again.events if isinstance(event, CheckpointRefused)]
    assert "does not match its checksum" in refused.reason
    assert identical(expected, again)


def test_a_checkpoint_that_one_rank_cannot_load_is_refused_on_all(train, whole):
    expected = whole(2, log_interval=1)
    train(2, name="unfit", log_interval=1)
    again = train(2, name="unfit", log_interval=1, target="tests.launch.targets:fail_to_restore", timeout_seconds=20)
    (refused,) = [event for event in again.events if isinstance(event, CheckpointRefused)]
    assert refused.reason == "the checkpoint does not fit this training: RuntimeError: no room"
    assert identical(expected, again)


def test_another_trainings_checkpoint_in_the_output_is_kept(train, tmp_path):
    train(1, name="one", seed=6)
    before = (tmp_path / "one" / "checkpoint").read_bytes()
    words = f"got {tmp_path}/one: the checkpoint there belongs to another training: its seed was 6, now it is 5: give"
    with pytest.raises(InputError, match=f"^output must not be where another training is unfinished, {words}"):
        train(1, name="one", seed=5)
    assert (tmp_path / "one" / "checkpoint").read_bytes() == before


def test_what_is_logged_after_a_resume_is_what_an_undisturbed_run_logs(train, whole):
    def logged(trained):
        return {(event.epoch, event.step): event.measures for event in trained.events if isinstance(event, StepLogged)}

    expected = whole(2, epochs=2, log_interval=7)
    train(2, epochs=2, log_interval=7, target="tests.launch.targets:stop_while_behind", name="cut")
    resumed = train(2, epochs=2, log_interval=7, name="cut")
    assert (0, 14) in logged(resumed), "which tells of step 8, before the cut"
    assert logged(resumed) == {position: logged(expected)[position] for position in logged(resumed)}


class Full(Validated):
    """Has all that a checkpoint may have."""

    ema_decay, headline = 0.5, "loss"

    def measure(self, outputs, batch):
        return {**super().measure(outputs, batch), "tokens": torch.ones(len(batch))}


def test_a_resume_restores_all_that_a_checkpoint_has(alone, tmp_path):
    settings, options = Settings(epochs=3, patience=3, skip_spikes=6, virtual_ranks=2), RunOptions(keep_checkpoint=True)
    states = []
    for _ in range(2):
        training.train(Full, settings, options, output=tmp_path)
        states.append(torch.load(tmp_path / "final-checkpoint", weights_only=True)["state"])
        shutil.copy(tmp_path / "final-checkpoint", tmp_path / "checkpoint")  # nothing is left to train
    for state in states:
        del state["progress"]["ran_on"]
    assert not differences(*states)
