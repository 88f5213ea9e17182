"""A profile that cannot be written."""

from contextlib import nullcontext

import pytest
import torch
from torch import nn

from flyte_ddp.engine.monitor.profile import profiling
from tests.engine.test_results import small_files


@pytest.mark.parametrize(
    ("limit", "folder", "reason"),
    [(small_files(2000), "", "[Errno 27] File too large"), (nullcontext(), "file/below", "[Errno 20] Not a directory")],
)
def test_a_disk_that_takes_no_profile_ends_no_training(tmp_path, capsys, limit, folder, reason):
    (tmp_path / "file").touch()
    path = tmp_path / folder
    network = nn.Linear(4, 4)
    optimizer = torch.optim.SGD(network.parameters())
    with limit, profiling(str(path), 0, optimizer):
        for _ in range(11):
            network(torch.ones(2, 4)).sum().backward()
            optimizer.step()
    assert f"{path} lacks the profile of rank 0: {reason}" in capsys.readouterr().err
