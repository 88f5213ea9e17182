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
    """Provide the run's folder, logs and checkpoint store for the block.

    On a cluster, logs and checkpoints are uploaded while the block runs. Locally, the folder is removed if the block
    fails. The folder's name has `name` in it. `key` is the digest of all that determines the result: an earlier run
    with this key may have left a checkpoint. The other arguments are those of checkpoint_store.
    """
    with (
        run_folder(platform, name) as folder,
        kept_logs(platform, folder) as logs,
        checkpoint_store(platform, key, resume, resume_from, is_by_ranks) as store,
    ):
        yield Run(folder, logs, store)
