"""Trainings of recipes for sharding, to be compared. Where torch cannot shard, whatever imports this is skipped."""

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import distributed

from flyte_ddp.events import CheckpointRefused, CheckpointWritten, RunStarted, StepLogged
from flyte_ddp.settings import RunOptions
from flyte_ddp.training import train
from tests.engine.probe_recipes import Settings
from tests.small_training import Unplugged

fsdp = pytest.importorskip("torch.distributed.fsdp")
if not hasattr(fsdp.FSDPModule, "set_reduce_scatter_unused_params"):
    pytest.skip("sharding needs a newer torch", allow_module_level=True)

HERE = "tests.engine.sharding_recipes"
KINDS = "off", "full"
WHOLE: dict[str, Any] = {"batch_size": 16, "validation_fraction": 0.2, "epochs": 2}


def run(
    name, output, sharding="full", nproc=1, watch=lambda event: None, seconds=1e9, init=None, keep_best=0, **settings
):
    """Losses of each step, the result and its weights."""
    options = RunOptions(
        nproc=nproc, sharding=sharding, tracking="off", loader_workers=0, keep_checkpoint=True,
        checkpoint_seconds=seconds, keep_best=keep_best,
    )  # fmt: skip
    losses = {}

    def listen(event):
        if isinstance(event, StepLogged):
            losses[event.epoch, event.step] = event.measures["loss"]
        watch(event)

    given = Settings(**{"log_interval": 1, **settings})
    try:
        result = train(f"{HERE}:{name}", given, options, output=output, on_event=listen, init=init)
    finally:
        if distributed.is_initialized():  # a rank of this process that fails ends without parting from the others
            distributed.destroy_process_group()
    return losses, result, torch.load(result.model_path, weights_only=True)


def assert_alike(one, other):
    """The same up to rounding: losses, weights and measures."""
    steps = one[0].keys() & other[0].keys()
    assert [one[0][step] for step in steps] == pytest.approx([other[0][step] for step in steps], rel=1e-5)
    assert list(one[2]) == list(other[2])
    size = math.sqrt(sum(float(value.double().square().sum()) for value in other[2].values()))
    gaps = (one[2][key].double() - value.double() for key, value in other[2].items())
    assert math.sqrt(sum(float(gap.square().sum()) for gap in gaps)) < 1e-4 * size
    assert one[1].tested == pytest.approx(other[1].tested, rel=1e-3)


def interrupt(output, after, name="Everything", **how):
    """A training whose caller fails once so many checkpoints are written."""
    left = iter(range(after))

    def unplug(event):
        if isinstance(event, CheckpointWritten) and next(left, None) is None:
            raise Unplugged

    with pytest.raises(Unplugged):
        run(name, output, watch=unplug, seconds=0, **how)
    assert Path(output, "checkpoint").exists()


class Seen:
    """Sees where a training starts and has a checkpoint, and fails after so many events that are left, which kills the
    ranks."""

    def __init__(self, left=10**9):
        self.left, self.started, self.reached, self.refused = left, (0, 0), (0, 0), []

    def __call__(self, event):
        if isinstance(event, RunStarted):
            self.started = event.first_epoch, event.first_step
        elif isinstance(event, CheckpointWritten):
            self.reached = event.epoch, event.step
        elif isinstance(event, CheckpointRefused):
            self.refused.append(event.reason)
        self.left -= isinstance(event, (CheckpointWritten, StepLogged))
        if self.left < 0:
            raise Unplugged
