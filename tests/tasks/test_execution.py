"""What Flyte is told of a failure: that another attempt can help, or that it cannot."""

import pytest
from flytekit import FlyteContextManager

from flyte_ddp.errors import InputError
from flyte_ddp.recipes.hyperparameters import Hyperparameters
from flyte_ddp.tasks.execution import TaskFailed, TaskInterrupted, flyte_retries
from flyte_ddp.tasks.train import image_subject
from tests.unreliable_storage import UnreliableStorage


def test_an_input_that_storage_does_not_deliver_now_is_worth_a_retry(tmp_path, monkeypatch):
    monkeypatch.setattr(UnreliableStorage, "failures", 1)
    storage = FlyteContextManager.current_context().file_access
    with pytest.raises(TaskInterrupted) as failed, flyte_retries():
        storage.get_data("unreliable://bucket/data", str(tmp_path), is_multipart=True)
    headline, *others = str(failed.value).splitlines()
    assert "Failed to get data from unreliable://bucket/data" in headline
    assert "503 Slow Down" in headline
    assert not others
    assert failed.value.failure.cause == "DownloadError"


def test_a_damaged_download_is_worth_a_retry_and_names_no_folder_to_delete(tmp_path):
    (tmp_path / "dataset.json").write_text("{")
    with pytest.raises(TaskInterrupted) as failed, flyte_retries():
        image_subject(Hyperparameters(), tmp_path)
    assert "dataset.json is broken JSON in this pod: " in str(failed.value)
    assert "--overwrite-cache" in str(failed.value)
    assert "delete" not in str(failed.value)


def test_a_wrong_input_is_final():
    with pytest.raises(TaskFailed, match=r"^epochs must be 1, got 2$") as failed, flyte_retries():
        raise InputError("epochs must be 1, got 2")
    assert not isinstance(failed.value, TaskInterrupted)
    assert (failed.value.failure.rank, failed.value.failure.cause) == (None, "InputError")
