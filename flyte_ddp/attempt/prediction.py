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
    """Write the predictions (n, ...) of a trained network for a shard of a split, in a process of its own.

    Args:
        platform: the platform.
        subject: the recipe, its settings and data.
        model: the weights.
        shard: the number of the shard, from 0.
        shards: the number of shards.
        split: "train", "validation" or "test".

    Returns:
        The path of an .npy file in float32, in the order of the split's samples.

    Raises:
        InputError: there is no such shard, or the recipe has no predictions.
    """
    if not 0 <= shard < shards:
        raise InputError(f"shard must be at least 0 and below shards ({shards}), got {shard}")
    with run_folder(platform, f"{subject.dataset}-predictions") as folder:
        job = make_job(subject, model_path=model, logs=folder)
        world = choose_world("gloo", 1, 1)
        asked = (job, split, shard, shards)
        run_alone(PREDICT, asked, job.options, open_console(), world, subject.root)
    return folder / f"predictions-{shard}.npy"
