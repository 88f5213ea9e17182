"""What is copied of a checkpoint, while training waits."""

import torch
from torch import nn

from flyte_ddp.engine.checkpoints.checkpoint import FORMAT, read_checkpoint
from flyte_ddp.engine.checkpoints.writer import begin_file
from flyte_ddp.engine.monitor.best_tracker import BestTracker


def test_tied_weights_are_copied_from_a_gpu_once(tmp_path):
    weight = nn.Parameter(torch.randn(1000, 64))
    network = nn.ParameterDict({"embedding": weight, "head": weight})
    state = {"model": network.state_dict(), "views": [weight[:1], weight.view(torch.int32)[:1]]}
    rest = begin_file(
        tmp_path / "checkpoint", {}, {"format": FORMAT, "identity": {}, "state": state}, torch.device("cuda")
    )
    before = weight.detach().clone()
    nn.init.zeros_(weight)
    rest()
    model, (row, bits) = read_checkpoint(tmp_path / "checkpoint", {})["state"].values()
    one, other = model.values()
    assert torch.equal(one, before)
    assert torch.equal(row, before[:1])
    assert torch.equal(bits.view(torch.float32), before[:1])
    assert one.data_ptr() == other.data_ptr()
    best = BestTracker("loss", is_lower_better=True)
    best.after_evaluation(0, {"loss": 1.0}, network.state_dict())
    one, other = (best.weights or {}).values()
    assert one.data_ptr() == other.data_ptr() != weight.data_ptr()
