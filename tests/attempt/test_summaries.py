"""How much of the GPUs a training has made use of, where that is known."""

from pathlib import Path

import pytest

from flyte_ddp.attempt.summaries import summarise
from flyte_ddp.attempt.trained import Trained
from flyte_ddp.engine.job import TrainingResult
from flyte_ddp.launch.environment import World
from flyte_ddp.launch.peaks import model_flops_utilization
from flyte_ddp.report.record import RunFinished


@pytest.mark.parametrize(
    ("hardware", "backend", "share"),
    [("NVIDIA A100-SXM4-80GB", "nccl", 0.25), ("NVIDIA A100-SXM4-80GB", "gloo", None), ("CPU, AVX512", "gloo", None)],
)
def test_ranks_that_may_share_a_gpu_have_no_mfu(hardware, backend, share):
    assert model_flops_utilization(312e6 * 1e6 / 2, hardware, "bfloat16", World(2, 2, backend, "cuda")) == share


def test_a_loop_that_ends_within_its_first_epoch_has_figures():
    results, path = [TrainingResult([], [], "loss", 1, 1, "float32", 1, 1)], Path("model.pt")
    figures = summarise(World(1, 1, "gloo", "cpu"), RunFinished(results, None, 1.0), "")
    assert (figures.samples_per_second, figures.train_seconds) == (0, 0)
    summary = Trained("recipe:Name", "data", results, figures, None, path, path, path, "").recipe_summary()
    assert (summary.measures, summary.validation_measures) == ({}, {})
