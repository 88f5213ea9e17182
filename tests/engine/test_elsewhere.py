"""Evaluations by another process have the same numbers, choose the same epoch, and none is lost with that process."""

import errno
import os
import resource
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from fsspec.implementations.memory import MemoryFileSystem

from flyte_ddp.code.user_code import find_code
from flyte_ddp.engine import elsewhere, evaluator, mailbox, worker
from flyte_ddp.engine.elsewhere import Awaited
from flyte_ddp.engine.job import LAST, job_of, subject_of
from flyte_ddp.engine.mailbox import ENDED, EVALUATOR, TRAINING, Mailbox
from flyte_ddp.errors import DataError, InputError
from flyte_ddp.events import EpochFinished, StepLogged
from flyte_ddp.launch.failures import PreemptedError, RecoverableRankError
from flyte_ddp.recipes.hyperparameters import Hyperparameters
from flyte_ddp.settings import RunOptions
from flyte_ddp.training import evaluate
from flyte_ddp.training import train as train_recipe
from tests.small_training import RECIPE, identical

ROOT = Path(__file__).resolve().parents[2]
SETTINGS: dict[str, Any] = {
    "batch_size": 16, "epochs": 4, "precision": "float32", "validation_fraction": 0.2, "virtual_ranks": 2,
    "patience": 2, "minimum_delta": 5.0,
}  # fmt: skip
OPTIONS: dict[str, Any] = {"loader_workers": 0, "tracking": "off", "keep_best": 2}


def evaluator_of(data, place):
    """Another process, as a user starts it."""
    given = {"nproc": 1, "evaluate_elsewhere": place, "data": data, **OPTIONS, **SETTINGS}
    options = [part for name, value in given.items() for part in (f"--{name.replace('_', '-')}", str(value))]
    kind = f"{Hyperparameters.__module__}:{Hyperparameters.__qualname__}"
    command = [sys.executable, "-m", "flyte_ddp", "evaluate", "--settings-class", kind, RECIPE, *options]
    return subprocess.Popen(command, cwd=ROOT, text=True, stderr=subprocess.PIPE)


def trained(data, output, nproc=1, on_event=None, **options):
    hp = Hyperparameters(**SETTINGS)
    return train_recipe(RECIPE, hp, RunOptions(nproc=nproc, **{**OPTIONS, **options}), data, output, on_event=on_event)


@pytest.mark.slow
def test_what_is_evaluated_elsewhere_is_the_same_and_ends_the_training_at_the_same_epoch(small_data, tmp_path):
    expected = trained(small_data, tmp_path / "here")
    with evaluator_of(small_data, tmp_path / "place") as process:
        found = trained(small_data, tmp_path / "elsewhere", nproc=2, evaluate_elsewhere=str(tmp_path / "place"))
        _, said = process.communicate()
    assert [epoch.validation for epoch in found.epochs] == [epoch.validation for epoch in expected.epochs]
    assert len(found.epochs) == 3
    assert (found.digest, found.best_epoch, found.tested) == (expected.digest, expected.best_epoch, expected.tested)
    assert found.warnings == expected.warnings
    assert [(one.file, one.value) for one in found.kept] == [(one.file, one.value) for one in expected.kept]
    for name in (LAST, *(one.file for one in found.kept)):
        one, other = (torch.load(result.output / name, weights_only=True) for result in (found, expected))
        assert all(torch.equal(weight, other[key]) for key, weight in one.items()), name
    assert process.returncode == 0
    assert said.count("] evaluation") == 3
    left = {file.name for file in (tmp_path / "place").rglob("*") if file.is_file()}
    assert left == {"training", "evaluator", "ended"}


@pytest.mark.slow
def test_an_evaluator_that_is_killed_may_be_started_again(small_data, tmp_path):
    expected, place = trained(small_data, tmp_path / "here"), tmp_path / "place"
    evaluators = [evaluator_of(small_data, place)]

    def kill_the_first(event):
        if isinstance(event, EpochFinished) and len(evaluators) == 1:
            evaluators[0].kill()
            evaluators.append(evaluator_of(small_data, place))

    found = trained(small_data, tmp_path / "elsewhere", on_event=kill_the_first, evaluate_elsewhere=str(place))
    assert len(evaluators) == 2
    for process in evaluators:
        process.communicate()
    assert [process.returncode for process in evaluators] == [-signal.SIGKILL, 0]
    assert (found.digest, found.warnings) == (expected.digest, expected.warnings)


def train_without_patience(environment, link, job):
    """As a rank, which takes an evaluator that has not been heard of for gone."""
    elsewhere.SILENT_SECONDS = 0.0
    return worker.run(environment, link, job)


def stop_after_second_epoch(event):
    """While the ranks wait for what the first one's evaluation has found."""
    if isinstance(event, StepLogged) and (event.epoch, event.step) == (1, 16):
        os.kill(os.getpid(), signal.SIGTERM)


@pytest.mark.slow
def test_a_training_whose_evaluator_is_gone_evaluates_by_itself_and_says_so(train, whole, tmp_path):
    settings = {"epochs": 3, "validation_fraction": 0.2}
    expected = whole(2, **settings)
    found = train(2, target=f"{__name__}:train_without_patience", evaluate_elsewhere=str(tmp_path / "p"), **settings)
    assert identical(found, expected)
    reasons = [warning.reason for warning in found.result.warnings]
    assert len(reasons) == 3
    assert all("by the training itself" in reason and "no evaluator has given a sign" in reason for reason in reasons)


def test_a_training_that_is_stopped_while_it_waits_goes_on_to_the_same_bits_without_an_evaluator(
    train, whole, tmp_path
):
    settings = {"epochs": 3, "validation_fraction": 0.2}
    with pytest.raises(PreemptedError, match="epoch 2, step 17"):
        train(1, stop_after_second_epoch, evaluate_elsewhere=str(tmp_path / "p"), **settings)
    found = train(1, **settings)
    assert identical(found, whole(1, **settings))
    epochs = [event.epoch for event in found.events if isinstance(event, EpochFinished)]
    assert epochs == [0, 1, 2]


def test_a_place_that_cannot_be_written_to_is_refused(train, tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(InputError, match=r"cannot write to .*/file/place"):
        train(1, evaluate_elsewhere=str(tmp_path / "file" / "place"))


def test_evaluating_without_a_place_is_refused():
    with pytest.raises(InputError, match=r"evaluate_elsewhere must be the folder or URL .* got none"):
        evaluate(RECIPE, Hyperparameters(), RunOptions())


def test_sharded_weights_are_evaluated_where_they_are(train, tmp_path):
    with pytest.raises(InputError, match="evaluate_elsewhere must be empty with sharding, got /there"):
        train(1, evaluate_elsewhere="/there", sharding="full")


def test_weights_that_are_others_here_than_there_are_not_evaluated(small_data, tmp_path):
    hp, place = Hyperparameters(**SETTINGS), str(tmp_path / "place")
    key = subject_of(find_code(RECIPE), hp, small_data).key
    weights = trained(small_data, tmp_path / "here").model_path
    Mailbox(place, key, TRAINING).hand_over("000000-other", torch.load(weights, weights_only=True))
    with pytest.raises(InputError, match="must have the same weights here as in the training, but what model"):
        evaluate(RECIPE, hp, RunOptions(nproc=1, loader_workers=0, evaluate_elsewhere=place), small_data)


class OnAFullDisk(Mailbox):
    def weights(self, name):
        raise OSError(errno.ENOSPC, "No space left on device")


def evaluate_on_a_full_disk(environment, link, job):
    """As a rank, which gives up at once."""
    vars(evaluator).update(Mailbox=OnAFullDisk, SILENT_SECONDS=0.0, POLL_SECONDS=0.01)
    return evaluator.run(environment, link, job)


def test_an_evaluator_that_cannot_fetch_the_weights_ends_and_keeps_no_training_waiting(
    small_data, tmp_path, monkeypatch
):
    hp, place = Hyperparameters(**SETTINGS), str(tmp_path / "place")
    key = subject_of(find_code(RECIPE), hp, small_data).key
    Mailbox(place, key, TRAINING).hand_over("000000-digest", {"weight": torch.ones(1)})
    monkeypatch.setattr("flyte_ddp.training.EVALUATOR", f"{__name__}:evaluate_on_a_full_disk")
    with pytest.raises(RecoverableRankError, match=r"evaluation 1 could not be fetched.*No space left.*TMPDIR"):
        evaluate(RECIPE, hp, RunOptions(nproc=1, loader_workers=0, evaluate_elsewhere=place), small_data)


# --- the mailbox ---


AWAITED = Awaited(0, EpochFinished(0, 1, {}, {}, 0.0, 0.0, digest="digest"), {"weight": torch.ones(1)})


class Busy(MemoryFileSystem):
    def put_file(self, *arguments, **options):
        raise RuntimeError("503 Slow Down")  # as some storages' own errors, which have nothing in common


def test_a_storage_that_fails_ends_no_training(tmp_path):
    training = Mailbox(f"memory://{tmp_path.name}", "key", TRAINING)
    training._stored.files = Busy()
    side = elsewhere.Elsewhere(training, torch.device("cpu"))
    side.hand_over(AWAITED)
    assert side._writer
    side._writer.join()
    assert side._look(training, AWAITED) == (None, f"memory://{tmp_path.name}/key: RuntimeError: 503 Slow Down")


def test_weights_that_another_run_has_removed_are_handed_over_again(place):
    training = Mailbox(place, "key", TRAINING)
    side = elsewhere.Elsewhere(training, torch.device("cpu"))
    for _ in range(2):
        assert side._look(training, AWAITED) is None
        assert training.files() == [f"{AWAITED.name}.pt"]
        training.clear(AWAITED.name)


@pytest.fixture(params=["folder", "storage"])
def place(request, tmp_path):
    return str(tmp_path) if request.param == "folder" else f"memory://{tmp_path.name}"


def test_a_full_disk_ends_no_training(place):
    training, before = Mailbox(place, "key", TRAINING), resource.getrlimit(resource.RLIMIT_FSIZE)
    side = elsewhere.Elsewhere(training, torch.device("cpu"))
    awaited = AWAITED._replace(weights={"weight": torch.ones(2**19)})
    resource.setrlimit(resource.RLIMIT_FSIZE, (2**20, before[1]))
    try:
        assert side._look(training, awaited) == (None, f"{place}/key: File too large")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_weights_and_answers_arrive_once_and_are_cleared(place):
    training, other = Mailbox(place, "key", TRAINING), Mailbox(place, "key", EVALUATOR)
    for number in (1, 0):
        training.hand_over(f"{number}-digest", {"weight": torch.tensor([number + 0.5])})
    assert other.files() == ["0-digest.pt", "1-digest.pt"]
    assert other.weights("1-digest")["weight"].item() == 1.5
    other.answer("1-digest", {"measures": {"loss": 0.1}})
    assert training.read_answer("1-digest") == {"measures": {"loss": 0.1}}
    training.clear("1-digest")
    training.clear("1-digest")
    assert other.files() == ["0-digest.pt"]
    assert Mailbox(place, "another", EVALUATOR).files() == []


@pytest.mark.parametrize("content", [b"", b"PK", b"no archive"])
def test_damaged_weights_are_handed_over_again(tmp_path, content):
    training, other = Mailbox(str(tmp_path), "key", TRAINING), Mailbox(str(tmp_path), "key", EVALUATOR)
    side, handed_over = elsewhere.Elsewhere(training, torch.device("cpu")), tmp_path / "key" / f"{AWAITED.name}.pt"
    training.hand_over(AWAITED.name, AWAITED.weights)
    handed_over.write_bytes(content)
    with pytest.raises(DataError, match=f"{AWAITED.name}.pt could not be read: "):
        other.weights(AWAITED.name)
    assert side._look(training, AWAITED) is None
    assert other.weights(AWAITED.name).keys() == AWAITED.weights.keys()


@pytest.mark.parametrize("content", [b"", b'{"measures": {"los', b"\xff"])
def test_a_damaged_answer_ends_no_training(tmp_path, content):
    training = Mailbox(str(tmp_path), "key", TRAINING)
    training.hand_over(AWAITED.name, AWAITED.weights)
    answer = tmp_path / "key" / f"{AWAITED.name}.json"
    answer.write_bytes(content)
    side = elsewhere.Elsewhere(training, torch.device("cpu"))
    assert side._look(training, AWAITED) == (None, f"{answer} is damaged")


def test_an_end_is_of_the_training_that_is_running(place):
    training, other = Mailbox(place, "key", TRAINING), Mailbox(place, "key", EVALUATOR)
    training.begin()
    training.end()
    assert other.files() == [ENDED]
    training.begin()
    assert other.files() == []


def test_an_end_that_an_earlier_training_has_left_is_believed_after_a_while(place, monkeypatch):
    """Its evaluator may be started before the training is."""
    job = job_of(subject_of(find_code(RECIPE), Hyperparameters()), RunOptions(evaluate_elsewhere=place))
    training = Mailbox(place, "key", TRAINING)
    requests, late = (evaluator.Requests(Mailbox(place, "key", EVALUATOR), job) for _ in range(2))
    training.end()
    assert requests.oldest() == ""
    training.begin()
    assert requests.oldest() == ""
    training.end()
    assert requests.oldest() is None
    assert late.oldest() == ""
    monkeypatch.setattr(evaluator, "SILENT_SECONDS", 0.0)
    assert late.oldest() is None


def test_each_sees_that_the_other_runs(place, monkeypatch):
    monkeypatch.setattr(mailbox, "BEAT_SECONDS", 0.001)
    training, other = Mailbox(place, "key", TRAINING), Mailbox(place, "key", EVALUATOR)
    silent = other.seconds_silent()
    with training.beating():
        for _ in range(2):  # the first beat, and one of those that follow
            while other.seconds_silent() >= silent:
                pass
            silent = other.seconds_silent()
