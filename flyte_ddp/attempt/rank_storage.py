"""Sharded checkpoints of ranks on many nodes, each of which speaks to the platform's storage for itself."""

import errno
from pathlib import Path
from typing import Any

from flyte_ddp.attempt.checkpoints import PlatformStore, patiently
from flyte_ddp.attempt.platform import Platform
from flyte_ddp.manifest import read_manifest, shards_beside, write_manifest
from flyte_ddp.report.background import one_line


class PlatformRankStorage:
    """The storage as one rank reaches it: the engine's RankStorage."""

    def __init__(self, platform: Platform, path: Path):
        self.path = path
        self._platform, self._folder = platform, platform.checkpoint_url()

    def put(self, file: Path) -> None:
        try:
            self._platform.put(file, f"{self._folder}/{file.relative_to(self.path.parent)}")
        except Exception as error:  # each storage has its own
            raise OSError(errno.EIO, f"{type(error).__name__}: {one_line(error)}") from None

    def get(self, url: str, file: Path) -> None:
        patiently(f"cannot read {url}", lambda: self._platform.get(url, file))


class StoreOfRanks(PlatformStore):
    """Rank 0's, which leaves the files of sharded checkpoints to the ranks. Of an earlier one it gets the manifest
    alone, to which it adds where the files are."""

    def get_shards(self, url: str, manifest_file: Path, manifest: dict[str, Any]) -> None:
        write_manifest(
            manifest_file, {**manifest, "url": f"{url}/{shards_beside(self.path).name}/{manifest['folder']}"}
        )

    def hand_on(self, url: str) -> None:
        """A copy of all files would take long: the next attempt is told where they are."""
        if not read_manifest(self.path):
            super().hand_on(url)
        elif url != self.folder:
            self._point_to(url)

    def pin_shards(self, manifest: dict[str, Any], folder: Path) -> None:
        pass

    def put_checkpoint(self, pinned: Path, manifest: dict[str, Any] | None) -> None:
        if manifest is None:
            super().put_checkpoint(pinned, manifest)
