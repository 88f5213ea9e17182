"""How much of the GPUs a training has made use of, where that is known."""

import pytest

from flyte_ddp.attempt.summaries import utilization
from flyte_ddp.engine.job import TrainingResult
from flyte_ddp.launch.environment import World


@pytest.mark.parametrize(
    ("hardware", "backend", "share"),
    [("NVIDIA A100-SXM4-80GB", "nccl", 0.25), ("NVIDIA A100-SXM4-80GB", "gloo", None), ("CPU, AVX512", "gloo", None)],
)
def test_ranks_that_may_share_a_gpu_have_no_utilization(hardware, backend, share):
    result = TrainingResult([], [], "accuracy", 1, 1, "bfloat16", 1, 1, sample_flops=312e6, hardware=hardware)
    assert utilization(result, 1e6 / 2, World(2, 2, backend, "cuda")) == share
