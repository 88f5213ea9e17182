"""The predictions of a trained network, shard by shard."""

from pathlib import Path

from flyte_ddp.attempt.folders import run_folder
from flyte_ddp.attempt.platform import Platform
from flyte_ddp.engine.job import Subject, make_job
from flyte_ddp.errors import InputError
from flyte_ddp.launch.alone import run_alone
from flyte_ddp.launch.environment import choose_world
from flyte_ddp.report.console import open_console

PREDICT = "flyte_ddp.engine.predict:run"


def write_predictions(platform: Platform, subject: Subject, model: Path, shard: int, shards: int, split: str) -> Path:
    """Write a trained network's predictions for a shard of a split, in a process of its own.

    The network computes in float32. A shard is a contiguous part of the split, so the shards' files, joined in order,
    have a row for each sample.

    Args:
        platform: the platform.
        subject: the recipe, its settings and data.
        model: the weights.
        shard: the number of the shard, from 0.
        shards: the number of shards.
        split: "train", "validation" or "test".

    Returns:
        The path of an .npy file (n, ...), a row for each sample of the shard, in the dtype of recipe.predictions().

    Raises:
        InputError: There is no such shard, or the recipe has no predictions.
        RankError: The process has failed or hangs.
    """
    if not 0 <= shard < shards:
        raise InputError(f"shard must be at least 0 and below shards ({shards}), got {shard}")
    with run_folder(platform, f"{subject.dataset}-predictions") as folder:
        job = make_job(subject, model_path=model, logs=folder)
        world = choose_world("gloo", 1, 1)
        asked = (job, split, shard, shards)
        run_alone(PREDICT, asked, job.options, open_console(), world, subject.root)
    return folder / f"predictions-{shard}.npy"
