"""Files of ModelCheckpoints in the logs, which are kept beside the checkpoint, too.

Each attempt has logs of its own, and the logs of an earlier attempt may be gone.
"""

import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from torch import distributed

from flyte_ddp.engine.collectives import broadcast_value
from flyte_ddp.engine.job import Job
from flyte_ddp.manifest import models_beside
from flyte_ddp.whole_files import link_or_copy, replacing


class KeptFiles:
    """The folder beside the checkpoint in which files of ModelCheckpoints are kept."""

    def __init__(self, job: Job):
        """Take the paths of the checkpoint and the logs from the job. Ranks other than 0 may have none."""
        self._folder = models_beside(Path(job.checkpoint_path or "another host's"))
        self._logs = os.path.realpath(job.logs)  # as ModelCheckpoint has it

    def keep(self, callbacks: Mapping[str, Any]) -> dict[str, Any]:
        """Copy the files of ModelCheckpoints from the logs to the folder beside the checkpoint, by a link if possible.

        Rank 0 alone calls it. Files outside of this attempt's logs are left out. An unchanged file is not copied again.
        Old copies stay until drop_others().

        Args:
            callbacks: the state of the callbacks, which names the files.

        Returns:
            What restore() needs: "logs", the folder of the logs, and "files", the name of each copy by the path of its
            file.

        Raises:
            OSError: A file could not be linked or copied.
        """
        files = {}
        for path in {*_paths(_checkpoints_in(callbacks))}:
            file = Path(path)
            if path.startswith(f"{self._logs}/") and file.is_file():
                status = file.stat()
                files[path] = name = f"{status.st_ino}-{status.st_mtime_ns}.pt"  # of this content: it is uploaded once
                self._keep(file.resolve(), self._folder / name)
        return {"logs": self._logs, "files": files}

    def _keep(self, file: Path, kept: Path) -> None:
        if not kept.exists():
            kept.parent.mkdir(exist_ok=True)
            _put(file, kept)

    def drop_others(self, kept: Mapping[str, Any]) -> None:
        """Remove the kept files that the newest checkpoint doesn't need. kept: what keep() returned for it."""
        for file in self._folder.glob("*.pt"):
            if file.name not in kept["files"].values():
                file.unlink(missing_ok=True)

    def restore(self, callbacks: dict[str, Any], kept: Mapping[str, Any]) -> list[str]:
        """Put the kept files into this attempt's logs, and change the paths in the callbacks' state; a collective.

        Rank 0 alone links or copies files, and replaces files of the same names. All ranks change the paths: in the
        states of ModelCheckpoints, each path in the earlier attempt's logs becomes one in the logs of rank 0.

        Args:
            callbacks: the state of the callbacks, which is changed in place.
            kept: what keep() returned in the attempt before.

        Returns:
            On rank 0, the names of the files that are neither kept nor in the logs. On other ranks, an empty list.

        Raises:
            OSError: Rank 0 cannot link or copy a file. The other ranks do not raise it.
        """
        gone = []
        before, now = kept["logs"], broadcast_value(self._logs)
        for path, name in kept["files"].items() if distributed.get_rank() == 0 else ():
            file = Path(_moved(path, before, now))
            file.parent.mkdir(parents=True, exist_ok=True)
            try:
                _put(self._folder / name, file)
            except FileNotFoundError:
                if not file.exists():
                    gone.append(file.name)
        callbacks.update(_moved(_checkpoints_in(callbacks), before, now))
        return gone


def _put(file: Path, target: Path) -> None:
    """Make `target` a hard link to a file, or a copy of the file where no link is possible.

    An existing target is replaced in one step, so it never has a part of a file. Raises FileNotFoundError if the file
    is gone.
    """
    with replacing(target) as beside:
        link_or_copy(file, beside)


def _checkpoints_in(callbacks: Mapping[str, Any]) -> dict[str, Any]:
    """Return the states of ModelCheckpoints among those of all callbacks."""
    return {key: state for key, state in callbacks.items() if isinstance(state, dict) and "best_k_models" in state}


def _paths(state: Any) -> Iterator[str]:
    """Yield all strings in a callback's state, which are paths or not: keys and values of nested dicts."""
    if isinstance(state, dict):
        for key, value in state.items():
            yield from (*_paths(key), *_paths(value))
    elif isinstance(state, str):
        yield state


def _moved(state: Any, before: str, now: str) -> Any:
    """Return a callback's state in which each path in the folder `before` is a path in the folder `now`."""
    if isinstance(state, dict):
        return {_moved(key, before, now): _moved(value, before, now) for key, value in state.items()}
    is_below = isinstance(state, str) and f"{state}/".startswith(f"{before}/")
    return f"{now}{state.removeprefix(before)}" if is_below else state
