"""A profile that cannot be written."""

import torch
from torch import nn

from flyte_ddp.engine.monitor.profile import profiling
from tests.engine.test_results import small_files


def test_a_full_disk_ends_no_training_that_is_profiled(tmp_path, capsys):
    network = nn.Linear(4, 4)
    optimizer = torch.optim.SGD(network.parameters())
    with small_files(2000), profiling(str(tmp_path), 0, optimizer):
        for _ in range(11):
            network(torch.ones(2, 4)).sum().backward()
            optimizer.step()
    assert f"{tmp_path} lacks the profile of rank 0: [Errno 27] File too large" in capsys.readouterr().err
