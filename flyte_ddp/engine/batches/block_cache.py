"""The blocks at hand, as files on the node's disk: fetched ahead, shared by the node's ranks, and soon deleted again.

    DDP_CACHE_DIR/ddp-blocks/<run>-<node>/<rank>/<split>-<block>.npy

A file is written beside its name and renamed, so a name always stands for a whole block. If another rank of the node
has a block, its file is linked, so the file system knows when no rank needs the block any more. Each rank locks a file
of its own for as long as it lives. A killed run leaves a folder without a living rank, which the next start removes.
"""

import fcntl
import os
import secrets
import shutil
import tempfile
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO

import numpy as np
from torch import distributed

from flyte_ddp.engine.batches.block_order import Uses
from flyte_ddp.engine.collectives import broadcast_value
from flyte_ddp.errors import InputError
from flyte_ddp.launch.environment import Environment
from flyte_ddp.whole_files import absolute, replacing, writing_to

VARIABLE = "DDP_CACHE_DIR"


class BlockCache:
    """The files of the blocks that this rank needs, on its node's disk. Nothing is on disk before open() is called."""

    def __init__(self, environment: Environment, cache_bytes: int = 0):
        """Choose the folder.

        Args:
            environment: this rank's place among all ranks.
            cache_bytes: the bytes for all ranks of the node together; 0 is half of what is free on the disk.
        """
        self.environment = environment
        self.cache_bytes = cache_bytes
        # The cache needs a folder of its own, because open() removes others' files there, and the user may name a disk
        self.root = absolute(os.environ.get(VARIABLE) or tempfile.gettempdir(), VARIABLE) / "ddp-blocks"
        self.budget = 0  # bytes for this rank's blocks
        self._alive: IO[bytes] | None = None  # a file that is locked for as long as this rank lives

    def open(self) -> None:
        """Create and lock this rank's folder, set `budget`, and remove what killed runs have left.

        A collective, unless there is no process group. The budget is this rank's share, in bytes, of cache_bytes, or
        else of half of the free disk. A second call does nothing.

        Raises:
            InputError: The folder cannot be written to. This rank alone raises it.
        """
        if self._alive:
            return
        run = secrets.token_hex(4)
        local_size = self.environment.world.local_size
        if distributed.is_initialized():
            run = broadcast_value(run)
        self.node = self.root / f"{run}-{self.environment.rank // local_size}"
        self.folder = self.node / str(self.environment.rank)
        with writing_to(self.root, VARIABLE):
            self.root.mkdir(parents=True, exist_ok=True)
            with locked(self.root / ".lock"):
                for other in self.root.glob("*-*"):
                    remove_if_left(other)
                self.folder.mkdir(parents=True)
                self._alive = open(self.node / f"{self.environment.rank}.alive", "wb")  # noqa: SIM115
                fcntl.flock(self._alive, fcntl.LOCK_EX)
            self.budget = (self.cache_bytes or shutil.disk_usage(self.root).free // 2) // local_size

    def __enter__(self) -> "BlockCache":
        return self

    def __exit__(self, *_: object) -> None:
        if self._alive:
            shutil.rmtree(self.folder, ignore_errors=True)
            fcntl.flock(self._alive, fcntl.LOCK_UN)  # closing the file is not enough: loader workers may still have it
            self._alive.close()
            self._alive = None
            with suppress(FileNotFoundError), locked(self.root / ".lock"):  # somebody may have removed the whole folder
                remove_if_left(self.node)

    def check(self, needed: int) -> None:
        """Raise InputError if this rank's share of the cache, `budget`, is too small. Call open() before.

        Args:
            needed: the bytes of the blocks that this rank needs at the same time.
        """
        if needed > self.budget:
            ranks = self.environment.world.local_size
            raise InputError(
                f"cache_bytes must be at least {needed * ranks:,} for the blocks that are needed at a time, got "
                f"{self.budget * ranks:,}{'' if self.cache_bytes else ', half of the free disk'}: raise it, let "
                f"{VARIABLE} name a folder on a larger disk, lower window or streams of Blocks, or write smaller blocks"
            )

    def path(self, name: str) -> Path:
        return self.folder / f"{name}.npy"

    def fetch(self, name: str, write: Callable[[Path], None]) -> None:
        """Put a block's file at path(name), unless the file is there already.

        If another rank of the node has the file, it is linked. Otherwise, or on a disk without links, `write` is
        called. Threads and ranks of the node may ask for the same block at the same time: one works while the others
        wait.

        Args:
            name: the name of the block.
            write: write(path) writes the block to a new file. Its errors are raised, except that an OSError becomes an
                InputError.

        Raises:
            InputError: The file cannot be written. The message tells the user to set DDP_CACHE_DIR.
        """
        path = self.path(name)
        with writing_to(self.root, VARIABLE), locked(self.node / f"{name}.lock"):
            if path.exists():
                return
            for others in self.node.glob(f"*/{path.name}"):
                with suppress(OSError):  # the file may be gone, and a disk may have no links
                    os.link(others, path)
                    return
            with replacing(path) as beside:
                write(beside)

    def delete(self, name: str) -> None:
        self.path(name).unlink(missing_ok=True)


@contextmanager
def locked(path: Path, operation: int = fcntl.LOCK_EX) -> Iterator[None]:
    with open(path, "wb") as file:
        fcntl.flock(file, operation)
        yield


def remove_if_left(folder: Path) -> None:
    """Remove the folder of a run on this node, unless a living rank uses it.

    A living rank holds a lock on its .alive file in the folder. The caller holds the lock of the cache.
    """
    for alive in folder.glob("*.alive"):
        try:
            with locked(alive, fcntl.LOCK_EX | fcntl.LOCK_NB):
                pass
        except BlockingIOError:
            return
    shutil.rmtree(folder, ignore_errors=True)


class Prefetcher:
    """Threads that fetch the blocks of an epoch in the order of their first use, as far as the cache has room.

    A block that a step waits for is fetched even if there is no room, so nothing waits forever.
    """

    def __init__(self, uses: Uses, sizes: np.ndarray, budget: int, threads: int):
        """Plan the fetching. start() begins it.

        Args:
            uses: the blocks to fetch, and the steps that need each.
            sizes: (n,) bytes of each of these blocks.
            budget: the bytes that the cache has room for.
            threads: how many blocks to fetch at a time.
        """
        self.blocks = uses.blocks.tolist()
        self.first = uses.first
        self.budget = budget
        self.threads = threads
        self.last = dict(zip(self.blocks, uses.last.tolist(), strict=True))
        self.sizes = dict(zip(self.blocks, sizes.tolist(), strict=True))
        self._changed = threading.Condition()
        self._waiting = -1  # the step that waits for blocks
        self._finished = -1  # the last step that is over
        self._next = 0  # the index of the block to fetch next
        self._held = 0  # the bytes of the blocks that are here or on the way
        self._here: set[int] = set()
        self._failure: BaseException | None = None
        self._is_closed = False

    def start(self, fetch: Callable[[int], None], delete: Callable[[int], None]) -> None:
        """Start the threads that fetch the blocks in the background.

        Args:
            fetch: fetch(block) brings a block into the cache; the threads call it. Its error ends the fetching, and
                wait() raises it.
            delete: delete(block) removes a block that no later step needs. The threads, and callers of finish() and
                close(), call it.
        """
        self._fetch = fetch
        self._delete = delete
        for _ in range(min(self.threads, len(self.blocks))):
            threading.Thread(target=self._work, daemon=True).start()

    def wait(self, step: int, blocks: Iterable[int]) -> None:
        """Wait until the blocks that a step needs are in the cache, or until close() is called.

        After close(), blocks may be missing.

        Args:
            step: the step. Steps ascend from call to call.
            blocks: the numbers of the blocks that the step needs.

        Raises:
            Exception: The error of `fetch` for any block of the epoch, even one that only a later step needs.
        """
        needed = set(blocks)
        assert all(self.last.get(block, -1) >= step for block in needed), "a block that was not announced"
        with self._changed:
            self._waiting = step
            self._changed.notify_all()
            self._changed.wait_for(lambda: self._failure or self._is_closed or needed <= self._here)
            if self._failure:
                raise self._failure

    def finish(self, step: int) -> None:
        """Delete the blocks whose last use was in this step or an earlier one."""
        with self._changed:
            self._finished = step
            self._delete_finished()

    def close(self) -> None:
        """End the threads, and delete all blocks except those that the threads are fetching."""
        with self._changed:
            self._is_closed = True
            self._finished = max(self.last.values(), default=-1)
            self._delete_finished()

    def _work(self) -> None:
        """Fetch one block after the other as there is room, until all are fetched, one fails, or close() is called.

        Each thread runs this method. An error is kept for wait() to raise. A block that comes after close() stays in
        the cache.
        """
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._is_closed or self._failure or self._may_go_on())
                if self._is_closed or self._failure or self._next == len(self.blocks):
                    return
                block = self.blocks[self._next]
                self._next += 1
                self._held += self.sizes[block]
            failure = None
            try:
                self._fetch(block)
            except BaseException as error:
                failure = error
            with self._changed:
                if self._is_closed:
                    return  # the next epoch may already use the file, and deletes it
                self._failure = self._failure or failure
                self._here.add(block)
                self._delete_finished()

    def _may_go_on(self) -> bool:
        """Return whether a thread may fetch the next block, or all are fetched; skip blocks of finished steps."""
        while self._next < len(self.blocks) and self.last[self.blocks[self._next]] <= self._finished:
            self._next += 1  # this rank had no sample of the block after all
        if self._next == len(self.blocks) or self.first[self._next] <= self._waiting:
            return True
        return self._held + self.sizes[self.blocks[self._next]] <= self.budget

    def _delete_finished(self) -> None:
        for block in [block for block in self._here if self.last[block] <= self._finished]:
            self._here.remove(block)
            self._held -= self.sizes[block]
            self._delete(block)
        self._changed.notify_all()


def needed_bytes(uses: Uses, sizes: np.ndarray) -> int:
    """Return the most bytes that blocks take at a time, if each is on the disk from its first use to its last.

    Args:
        uses: the blocks, at least one, and the steps that need each.
        sizes: (n,) bytes of each of these blocks.
    """
    times = np.concatenate([uses.first, uses.last + 1])
    changes = np.concatenate([sizes, -sizes])
    return int(np.cumsum(changes[np.lexsort([changes, times])]).max())
