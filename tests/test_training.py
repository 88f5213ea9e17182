"""What a plain call refuses before anything is started."""

import multiprocessing
import os
import subprocess
import sys
import tempfile
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from flyte_ddp.engine.job import Subject, job_in
from flyte_ddp.errors import InputError
from flyte_ddp.events import Event, StepLogged
from flyte_ddp.flyte1.platform import TaskError
from flyte_ddp.flyte1.recipe import RecipeTraining
from flyte_ddp.recipe import Recipe
from flyte_ddp.report.console import advise_resume
from flyte_ddp.report.goodput import Attempt, Goodput
from flyte_ddp.settings import RunOptions, TrainingSettings
from flyte_ddp.training import describe_run, find_import_name, locked_output, train
from tests.commands import unreadable
from tests.engine.probe_recipes import Settings, Sound


def test_a_class_is_named_by_its_module():
    assert find_import_name(Sound) == "tests.engine.probe_recipes:Sound"


def test_a_class_that_ranks_cannot_import_is_refused_with_the_remedy(tmp_path):
    class Local(Recipe):
        pass

    with pytest.raises(InputError, match=r"got .*Local of tests.test_training: put it into a file of its own"):
        train(Local, TrainingSettings(), output=tmp_path)

    @dataclass(frozen=True)
    class Settings(TrainingSettings):
        pass

    with pytest.raises(InputError, match=r"^settings must be .* got .*Settings of tests.test_training: put it into"):
        train(Sound, Settings(), output=tmp_path)


def test_data_that_are_not_there_are_refused(tmp_path):
    with pytest.raises(InputError, match=r"data must be an existing file or folder, got .*nowhere"):
        train(Sound, TrainingSettings(), data=tmp_path / "nowhere", output=tmp_path)


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"settings": {"epochs": 1}}, "settings must be an object of TrainingSettings or a subclass, got {'epochs"),
        ({"settings": TrainingSettings}, "settings must be an object of TrainingSettings or a subclass, got <class"),
        ({"options": {"nproc": 1}}, r"options must be an object of RunOptions, got {'nproc': 1}"),
        ({"recipe": Sound(TrainingSettings())}, 'recipe must be a name such as "package.module:Name", or the class'),
        (
            {"options": RunOptions(tracking="offline")},
            "RunOptions.tracking must be auto or off without a report, got off",
        ),
        ({"output": "s3://bucket/out"}, "output must be a folder of this machine, got s3://bucket/out: copy"),
    ],
)
def test_arguments_of_other_types_are_refused_before_anything_is_written(tmp_path, monkeypatch, given, words):
    monkeypatch.chdir(tmp_path)
    arguments: Any = {"recipe": Sound, "settings": TrainingSettings(), "options": RunOptions(), **given}
    with pytest.raises(InputError, match=f"^{words}"):
        train(**arguments)
    assert not list(tmp_path.iterdir())


def test_a_tracker_goes_on_with_the_run_that_an_earlier_attempt_has_begun(tmp_path):
    job = job_in(tmp_path, Subject("a:B", TrainingSettings(), "version", "data"), RunOptions())
    first, again, another = Goodput(1.0), Goodput(3.0, earlier=[Attempt(1.0, 2.0)]), Goodput(3.0)
    ids = [describe_run(tmp_path, job, goodput).tracking_id for goodput in (first, again, another)]
    assert ids[0] == ids[1] != ids[2]


def test_a_folder_whose_name_is_no_unicode_has_an_id_for_trackers_too(tmp_path):
    folder = tmp_path / os.fsdecode(b"latin-\xe9")
    job = job_in(folder, Subject("a:B", TrainingSettings(), "version", "data"), RunOptions())
    assert describe_run(folder, job, Goodput(1.0)).tracking_id


def test_the_training_of_a_task_is_refused_outside_of_one(tmp_path, monkeypatch):
    monkeypatch.setenv("DDP_RUNS_DIR", str(tmp_path))
    training = RecipeTraining("tests.engine.probe_recipes:Sound")
    with pytest.raises(TaskError, match=r"^run\(\) must be called in a task.*: call the task, or flyte_ddp.train"):
        training.run(TrainingSettings(), RunOptions())


SLEEPER = """if True:
    import sys
    from pathlib import Path
    from flyte_ddp.lock import held
    with held(Path(sys.argv[1])):
        print("held", flush=True)
        sys.stdin.read()
"""


@contextmanager
def another(folder):
    """A process that holds the folder."""
    command = [sys.executable, "-c", SLEEPER, str(folder)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout
        assert process.stdout.readline() == "held\n"
        yield process
        process.kill()


def test_a_folder_that_another_process_trains_into_is_refused_until_that_has_ended(tmp_path):
    with another(tmp_path) as process:
        holder = f"got {tmp_path}, which is in use by process {process.pid} on .*, since 2.*: give another output"
        with pytest.raises(InputError, match=holder), locked_output(tmp_path):
            pass
        process.kill()
        process.wait()
        with locked_output(tmp_path):
            assert f"process {os.getpid()} on" in (tmp_path / ".lock").read_text()
            with pytest.raises(InputError, match=r"in use by process .*, this one"), locked_output(tmp_path / "." / ""):
                pass
    assert not any(tmp_path.iterdir())


@pytest.mark.parametrize("look", [1, 2])
def test_a_lock_that_its_holder_removes_just_now_is_made_anew(tmp_path, monkeypatch, look):
    looks, stat = 0, Path.stat

    def stat_after_removal(path, **options):
        nonlocal looks
        looks += path.name == ".lock"
        if path.name == ".lock" and looks == look:
            path.unlink()
        return stat(path, **options)

    monkeypatch.setattr(Path, "stat", stat_after_removal)
    with locked_output(tmp_path):
        pass
    assert not any(tmp_path.iterdir())


def test_a_child_that_ends_leaves_the_folder_to_its_parent(tmp_path):
    with locked_output(tmp_path):
        child = multiprocessing.get_context("fork").Process(target=os.getpid)
        child.start()
        child.join()  # which has closed what it inherited
        done = subprocess.run([sys.executable, "-c", SLEEPER, str(tmp_path)], input="", capture_output=True, text=True)
    assert f"HeldError: process {os.getpid()} on" in done.stderr


def test_a_folder_that_may_not_be_written_is_refused_before_anything_is_trained():
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:
        words = f"^cannot write to {folder}: Permission denied; free or allow space there, or set output to another"
        with unreadable(Path(folder), 0o555), pytest.raises(InputError, match=words), locked_output(Path(folder)):
            pass


def test_what_killed_attempts_have_left_half_written_is_removed_and_nothing_else(tmp_path, monkeypatch):
    names = {".checkpoint.01ab.partial", ".model.pt.23cd.partial", ".predictions.npy.45ef.partial"}
    for name in names | {".mine.67ab.partial", "checkpoint.partial"}:
        (tmp_path / name).write_text("half")
    monkeypatch.setenv("WORLD_SIZE", "1")
    monkeypatch.setenv("RANK", "0")
    with pytest.raises(InputError, match="nproc must be 0"):  # the first thing after that
        train(Sound, TrainingSettings(), RunOptions(nproc=2), output=tmp_path)
    left = {path.name for path in tmp_path.iterdir()}
    assert left == {".mine.67ab.partial", "checkpoint.partial", "progress.jsonl"}


def test_what_was_trained_is_told_by_the_same_call_if_it_is_interrupted_at_the_end(tmp_path):
    events: list[Event] = []
    options = RunOptions(nproc=1, tracking="off")
    with pytest.raises((KeyboardInterrupt, SystemExit)):  # which flytekit makes of Ctrl-C, once it is imported
        train(Sound, Settings(), options, output=tmp_path, observers=["tests.report.listeners:Interrupts"])
    result = train(Sound, Settings(), options, output=tmp_path, on_event=events.append)
    assert len(result.epochs) == 1
    assert not any(isinstance(event, StepLogged) for event in events), "nothing is trained again"
    assert not (tmp_path / "checkpoint").exists()


def test_an_interrupted_command_that_removes_its_checkpoint_is_not_advised(tmp_path):
    assert advise_resume(tmp_path, resume=True) == f"the same command resumes from {tmp_path}"
    said = advise_resume(tmp_path, resume=False)
    assert said == f"the same command with resume: true resumes from {tmp_path}"


def test_a_training_does_not_start_from_a_file_that_it_replaces(tmp_path):
    for name in ("model.pt", "final-checkpoint"):
        (tmp_path / name).write_text("earlier")
        with pytest.raises(InputError, match=f"^init must not be in output, .* got {tmp_path}/{name}: give another"):
            train(Sound, TrainingSettings(), output=tmp_path, init=tmp_path / name)


def test_a_lock_that_is_a_link_is_not_followed(tmp_path):
    (tmp_path / "mine").write_text("mine")
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / ".lock").symlink_to(tmp_path / "mine")
    with pytest.raises(InputError, match=r"cannot write to .*out: Too many levels of symbolic links"):
        train(Sound, TrainingSettings(), output=tmp_path / "out")
    assert (tmp_path / "mine").read_text() == "mine"
