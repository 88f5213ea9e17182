"""The image files of a prediction, listed once: the keys of shards are made of this listing."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from flytekit.types.directory import FlyteDirectory

from flyte_ddp.errors import InputError, ReportedError
from flyte_ddp.flyte1.data import fetch, list_files
from flyte_ddp.inference.shards import Shard


@dataclass(frozen=True)
class Listing:
    """Names of files below a folder, with details that change when the files do; empty if there is no folder."""

    files: Sequence[tuple[str, str]]

    @classmethod
    def of(cls, folder: FlyteDirectory | None) -> "Listing":
        """List the files.

        Raises InputError for a folder without files: an empty listing stands for the dataset's split.
        """
        files = [] if folder is None else [*list_files(folder).items()]
        if folder is not None and not files:
            raise InputError(f"folder must contain image files, got {folder.path} without any: choose another folder")
        return cls(files)

    @classmethod
    def read(cls, path: Path) -> "Listing":
        return cls([(name, details) for name, details in json.loads(path.read_bytes())])

    def write(self, path: Path) -> Path:
        path.write_text(json.dumps(self.files), encoding="utf-8")
        return path

    def part(self, shard: Shard) -> "Listing":
        return Listing(self.files[shard.first : shard.last])

    def fetch(self, folder: FlyteDirectory | None, into: Path) -> list[tuple[str, str]]:
        """Return each name with the path of its file on this machine."""
        if folder is None:
            return []
        try:
            return fetch(folder, [name for name, _ in self.files], into)
        except FileNotFoundError:
            self.verify(folder)
            raise

    def verify(self, folder: FlyteDirectory | None) -> None:
        """Raise ReportedError if a file is no longer what it was when it was listed."""
        now = {} if folder is None else list_files(folder)
        changed = [name for name, details in self.files if now.get(name) != details]
        if changed:
            raise ReportedError(
                f"{len(changed):,} image files have changed while they were predicted, such as {changed[0]}: run "
                "again, and leave the folder as it is until the run has ended"
            )
