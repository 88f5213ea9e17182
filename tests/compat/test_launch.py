"""The private parts that the launcher uses; tests/launch/test_hang.py has processes that hang or are abandoned."""

import torch
from torch import distributed, nn
from torch.nn.parallel import DistributedDataParallel

from flyte_ddp.launch import launch_compat


def test_a_rank_counts_its_collectives(tmp_path):
    assert launch_compat.standing(0) == (0, True)
    distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        before, _ = launch_compat.standing(0)
        distributed.all_reduce(torch.ones(1))
        model = DistributedDataParallel(nn.Linear(1, 1))
        between, _ = launch_compat.standing(0)
        model(torch.ones(1)).backward()
        after, is_idle = launch_compat.standing(0)
    finally:
        distributed.destroy_process_group()
    assert before < between < after
    assert is_idle
