"""Sharded checkpoints of ranks on many nodes. Each rank connects to the platform's storage by itself."""

import errno
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from flyte_ddp.attempt.checkpoints import PlatformStore, patiently, point_to
from flyte_ddp.attempt.platform import Platform
from flyte_ddp.manifest import models_beside, read_manifest, shards_beside, write_manifest
from flyte_ddp.report.background import one_line


class PlatformRankStorage:
    """The platform's storage for one rank, as the engine's RankStorage."""

    def __init__(self, platform: Platform, path: Path):
        self.path = path
        self.store: StoreOfRanks | None = None
        self._platform = platform
        self._folder = platform.checkpoint_url()

    def put(self, file: Path) -> None:
        with _as_os_error():
            self._put(file)

    def put_manifest(self, file: Path) -> None:
        assert self.store
        with _as_os_error():
            self.store.put_by_rank(lambda: self._put(file))

    def get(self, url: str, file: Path) -> None:
        patiently(f"cannot read {url}", lambda: self._platform.get(url, file))

    def _put(self, file: Path) -> None:
        self._platform.put(file, f"{self._folder}/{file.relative_to(self.path.parent)}")


class StoreOfRanks(PlatformStore):
    """Rank 0's store, which leaves sharded checkpoints to the ranks.

    Of an earlier checkpoint it downloads only the manifest, and adds the URL of the files to it.
    """

    def __init__(self, path: Path, platform: Platform, ranks: PlatformRankStorage):
        """Open the store.

        Args:
            path: the checkpoint on this machine.
            platform: the platform.
            ranks: rank 0's own storage.
        """
        self._lock = threading.Lock()
        self._is_left_to_ranks = False
        super().__init__(path, platform)
        ranks.store = self

    def put_by_rank(self, put_manifest: Callable[[], None]) -> None:
        """Upload the models that a checkpoint needs, then its manifest.

        The file at the path is an earlier checkpoint.
        """
        with self._lock:
            self._is_left_to_ranks = True
            self._models.put(models_beside(self.path), put_manifest)

    def get_shards(self, url: str, manifest_file: Path, manifest: dict[str, Any]) -> None:
        write_manifest(
            manifest_file, {**manifest, "url": f"{url}/{shards_beside(self.path).name}/{manifest['folder']}"}
        )

    def hand_on(self, url: str) -> None:
        """Tell the next attempt where the files are, because copying all of them would take long."""
        if not read_manifest(self.path):
            super().hand_on(url)
        elif url != self.folder:
            point_to(self._platform, url)

    def put_newest(self) -> None:
        with self._lock:
            if not self._is_left_to_ranks and not read_manifest(self.path):
                super().put_newest()


@contextmanager
def _as_os_error() -> Iterator[None]:
    """Turn each storage's own errors into an OSError."""
    try:
        yield
    except Exception as error:
        raise OSError(errno.EIO, f"{type(error).__name__}: {one_line(error)}") from None
