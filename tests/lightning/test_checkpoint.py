"""The files that a training under Lightning resumes from."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from flyte_ddp.errors import RecoverableError
from flyte_ddp.lightning import checkpoint
from flyte_ddp.lightning.checkpoint import CheckpointFiles


def test_one_that_is_gone_at_the_second_reading_is_worth_a_retry(monkeypatch):
    monkeypatch.setattr(checkpoint, "state_on_all_ranks", lambda *_: None)
    job: Any = SimpleNamespace(checkpoint_path="the/checkpoint.pt", logs="logs")
    trainer: Any = SimpleNamespace()
    with pytest.raises(
        RecoverableError, match=r"^the/checkpoint\.pt is gone or damaged, but this attempt must load it once more$"
    ):
        CheckpointFiles(job, lambda event: None, torch.device("cpu")).restore_tensors(trainer)
