"""What a task leaves and says when it fails."""

import sys
from contextlib import suppress
from pathlib import Path
from typing import List

import pytest
from flytekit import FlyteContextManager
from flytekit.core.context_manager import ExecutionState

from flyte_ddp.errors import DataError, RecoverableError
from flyte_ddp.tasks.execution import TaskInterrupted, as_task_error, run_dir


def test_a_message_of_any_length_and_content_reaches_flyte():
    failed = as_task_error(RecoverableError("\udce4" + "a" * 10**6 + "\n\n" + "b" * 10**6 + "the cause"), "s3://logs")
    message = str(failed)
    assert isinstance(failed, TaskInterrupted)
    assert len(message.encode()) < 200_000
    assert message.startswith("\\udce4aaa")
    assert "\nLogs: s3://logs\n" in message
    assert message.endswith("bthe cause")


def test_a_failed_local_run_leaves_no_folder_though_an_observer_still_writes(tmp_path, monkeypatch):
    monkeypatch.setenv("DDP_RUNS_DIR", str(tmp_path))
    places: List[Path] = []

    def observe(event, arguments):
        if event == "os.rmdir" and places:
            with suppress(FileNotFoundError):
                (places.pop() / "report.html").write_text("")

    def fail(folder):
        places.append(folder)
        raise DataError("broken")

    sys.addaudithook(observe)
    context = FlyteContextManager.current_context()
    state = context.new_execution_state().with_params(mode=ExecutionState.Mode.LOCAL_TASK_EXECUTION)
    local = FlyteContextManager.with_context(context.with_execution_state(state))
    with pytest.raises(DataError), local, run_dir("digits") as folder:
        fail(folder)
    assert list(tmp_path.iterdir()) == []
