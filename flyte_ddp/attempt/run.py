"""The files of a run."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from flyte_ddp.attempt.checkpoints import CheckpointStore, checkpoint_store
from flyte_ddp.attempt.folders import run_folder
from flyte_ddp.attempt.logs import Logs, kept_logs
from flyte_ddp.attempt.platform import Platform


@dataclass(frozen=True)
class Run:
    """The files of a training: its folder, the logs in it, and the checkpoint."""

    folder: Path
    logs: Logs
    store: CheckpointStore


@contextmanager
def training_run(
    platform: Platform,
    name: str,
    key: str,
    resume: bool,
    resume_from: str = "",
    is_by_ranks: bool = False,
) -> Iterator[Run]:
    """Provide a run's folder, logs and checkpoint store for the block.

    A context manager. On a cluster, logs and checkpoints are uploaded during the block. In a local run, the run's
    folder is removed if the block fails.

    Args:
        platform: the platform.
        name: is put into the folder's name in a local run.
        key: the digest of all that determines the result. An earlier local run with this key may have left a
            checkpoint.
        resume: whether to go on from an earlier checkpoint of this training: the local one, or the previous attempt's.
        resume_from: the folder of the checkpoint to use if there is no earlier one; empty is none.
        is_by_ranks: whether ranks on many nodes upload and download the files of a sharded checkpoint themselves.

    Yields:
        The run.

    Raises:
        InputError: The folder resume_from has no checkpoint, or the local folder for runs cannot be written to.
        RecoverableError: The storage does not deliver the checkpoint.
        Exception: What the block raises. On a cluster, all errors of this library become the platform's error.
    """
    with (
        run_folder(platform, name) as folder,
        kept_logs(platform, folder) as logs,
        checkpoint_store(platform, key, resume, resume_from, is_by_ranks) as store,
    ):
        yield Run(folder, logs, store)
