"""What Flyte is told of a failure: that another attempt can help, or that it cannot; and what a failed task leaves."""

import sys
from contextlib import suppress
from pathlib import Path

import pytest
from flytekit import FlyteContextManager
from flytekit.core.context_manager import ExecutionState

from flyte_ddp.attempt.failures import attempt_error, platform_errors, to_failure
from flyte_ddp.attempt.folders import run_folder
from flyte_ddp.attempt.platform_training import image_subject
from flyte_ddp.errors import DataError, InputError, RecoverableError
from flyte_ddp.flyte1 import platform
from flyte_ddp.flyte1.platform import TaskError, TaskInterruptedError
from flyte_ddp.flyte1.prepare import prepare_dataset
from flyte_ddp.recipes.hyperparameters import Hyperparameters
from tests.commands import OFFLINE
from tests.unreliable_storage import UnreliableStorage


def test_an_input_that_storage_does_not_deliver_now_is_worth_a_retry(tmp_path, monkeypatch):
    monkeypatch.setattr(UnreliableStorage, "failures", 1)
    storage = FlyteContextManager.current_context().file_access
    with pytest.raises(TaskInterruptedError) as failed, platform_errors(platform):
        storage.get_data("unreliable://bucket/data", str(tmp_path), is_multipart=True)
    headline, *others = str(failed.value).splitlines()
    assert "Failed to get data from unreliable://bucket/data" in headline
    assert "503 Slow Down" in headline
    assert not others
    assert failed.value.failure.cause == "DownloadError"


def test_a_lost_mirror_is_worth_a_retry(tmp_path, monkeypatch):
    nowhere = {"DDP_DATA_MIRROR": (tmp_path / "nowhere").as_uri(), "DDP_DATA_DIR": str(tmp_path / "data")}
    for name, value in {**nowhere, **OFFLINE}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(TaskInterruptedError, match=r"no mirror delivered train-images-idx3-ubyte\.gz") as failed:
        prepare_dataset.task_function(name="mnist")
    assert failed.value.failure.cause == "DownloadError"


def test_a_damaged_download_is_worth_a_retry_and_names_no_folder_to_delete(tmp_path):
    (tmp_path / "dataset.json").write_text("{")
    with pytest.raises(TaskInterruptedError) as failed, platform_errors(platform):
        image_subject(Hyperparameters(), tmp_path)
    assert "dataset.json is broken JSON in this pod: " in str(failed.value)
    assert "--overwrite-cache" in str(failed.value)
    assert "delete" not in str(failed.value)


def test_a_wrong_input_is_final():
    with pytest.raises(TaskError, match=r"^epochs must be 1, got 2$") as failed, platform_errors(platform):
        raise InputError("epochs must be 1, got 2")
    assert not isinstance(failed.value, TaskInterruptedError)
    assert (failed.value.failure.rank, failed.value.failure.cause) == (None, "InputError")


def test_a_message_of_any_length_and_content_reaches_flyte():
    error = RecoverableError("\udce4" + "a" * 10**6 + "\n\n" + "b" * 10**6 + "the cause")
    failed = attempt_error(platform, to_failure(platform, error), "Logs: s3://logs")
    message = str(failed)
    assert isinstance(failed, TaskInterruptedError)
    assert len(message.encode()) < 200_000
    assert "\\udce4aaa" in message[:200]
    assert "\nLogs: s3://logs\n" in message
    assert message.endswith("bthe cause")


def local_task():
    context = FlyteContextManager.current_context()
    state = context.new_execution_state().with_params(mode=ExecutionState.Mode.LOCAL_TASK_EXECUTION)
    return FlyteContextManager.with_context(context.with_execution_state(state))


def test_a_failed_local_run_leaves_no_folder_though_an_observer_still_writes(tmp_path, monkeypatch):
    monkeypatch.setenv("DDP_RUNS_DIR", str(tmp_path))
    places: list[Path] = []

    def observe(event, arguments):
        if event == "os.rmdir" and places:
            with suppress(FileNotFoundError):
                (places.pop() / "report.html").write_text("")

    def fail(folder):
        places.append(folder)
        raise DataError("broken")

    sys.addaudithook(observe)
    with pytest.raises(DataError), local_task(), run_folder(platform, "digits") as folder:
        fail(folder)
    assert list(tmp_path.iterdir()) == []


def test_whoever_removes_the_folder_of_a_local_run_hears_why_it_has_failed(tmp_path, monkeypatch):
    monkeypatch.setenv("DDP_RUNS_DIR", str(tmp_path))

    def fail(folder):
        folder.rmdir()
        raise DataError("broken")

    with pytest.raises(DataError), local_task(), run_folder(platform, "digits") as folder:
        fail(folder)
