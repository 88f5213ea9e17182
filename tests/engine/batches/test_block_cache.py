"""The files of blocks: shared by the ranks of a node, within a budget, and gone after their last use."""

import os
import shutil
import threading
from pathlib import Path

import numpy as np
import pytest

from flyte_ddp.engine.batches.block_cache import BlockCache, Prefetcher, needed_bytes
from flyte_ddp.engine.batches.block_order import Uses
from flyte_ddp.errors import DataError, InputError
from flyte_ddp.launch.environment import Environment, World


@pytest.fixture
def place(tmp_path, monkeypatch):
    monkeypatch.setenv("DDP_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr("secrets.token_hex", lambda count: "run")  # the same on all ranks
    return tmp_path / "cache" / "ddp-blocks"


def cache_of(rank=0, ranks=1, local_size=1, cache_bytes=1000):
    cache = BlockCache(Environment(World(ranks, local_size, "gloo", "cpu"), rank, rank, "", 1), cache_bytes)
    cache.open()
    return cache


def write(path):
    path.write_bytes(b"block")


def never(path):
    raise AssertionError("it is there already")


def test_a_block_is_fetched_once_for_all_ranks_of_a_node(place):
    with cache_of(0, 3, 2) as first, cache_of(1, 3, 2) as second, cache_of(2, 3, 2) as elsewhere:
        first.fetch("train-1", write)
        first.fetch("train-1", never)
        second.fetch("train-1", never)
        with pytest.raises(AssertionError):
            elsewhere.fetch("train-1", never)
        first.delete("train-1")
        assert not first.path("train-1").exists()
        assert second.path("train-1").read_bytes() == b"block"
        assert (first.budget, second.budget) == (500, 500)
    assert os.listdir(place) == [".lock"]


def test_ranks_that_want_a_block_at_once_fetch_it_once(place):
    fetches, barrier = [], threading.Barrier(4)

    def write_slowly(path):
        fetches.append(path)
        write(path)

    def rank_of(cache):
        barrier.wait()
        for number in range(50):
            cache.fetch(f"train-{number}", write_slowly)

    with cache_of(0, 4, 4) as a, cache_of(1, 4, 4) as b, cache_of(2, 4, 4) as c, cache_of(3, 4, 4) as d:
        threads = [threading.Thread(target=rank_of, args=(cache,)) for cache in (a, b, c, d)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert len(fetches) == 50
        assert all(len(list(cache.folder.iterdir())) == 50 for cache in (a, b, c, d))


def test_what_cannot_be_written_leaves_nothing_and_names_the_folder(place):
    def fill(path):
        write(path)
        Path("/dev/full").write_bytes(b"block")

    with cache_of() as cache:
        with pytest.raises(InputError, match=f"cannot write to {place}: No space left on device; free .*DDP_CACHE_DIR"):
            cache.fetch("train-1", fill)
        assert os.listdir(cache.folder) == []


def test_a_folder_that_is_removed_meanwhile_ends_no_training(place):
    with cache_of():
        shutil.rmtree(place)


def test_a_running_training_keeps_its_files_when_another_starts(place, monkeypatch):
    with cache_of() as running:
        running.fetch("train-1", write)
        monkeypatch.setattr("secrets.token_hex", lambda count: "other")
        with cache_of():
            assert running.path("train-1").exists()


def test_what_else_is_in_the_folder_that_the_user_names_stays(place):
    """Such as where it is all of a larger disk."""
    results = place.parent / "my-results"
    results.mkdir(parents=True)
    (results / "model.pt").write_bytes(b"weights")
    with cache_of() as cache:
        cache.fetch("train-1", write)
    assert (results / "model.pt").read_bytes() == b"weights"


def test_by_default_half_of_the_free_disk_is_shared_by_the_ranks_of_a_node(place):
    with cache_of(0, 4, 4, cache_bytes=0) as cache:
        free = os.statvfs(place).f_bavail * os.statvfs(place).f_frsize
        assert cache.budget == pytest.approx(free / 2 / 4, rel=0.1)


# --- fetching ahead ---


USES = Uses(blocks=np.array([4, 2, 7, 1]), first=np.array([0, 0, 2, 5]), last=np.array([1, 3, 4, 6]))


class Fetches:
    """What is fetched and deleted, in order; ready: released for each fetch that is begun."""

    def __init__(self, fails=()):
        self.log, self.fails, self.ready = [], fails, threading.Semaphore(0)

    def fetch(self, block):
        self.log.append(block)
        self.ready.release()
        if block in self.fails:
            raise DataError(f"block {block} is broken")

    def delete(self, block):
        self.log.append(-block)


def ahead_of(fetches, budget, threads=1):
    ahead = Prefetcher(USES, np.array([10, 10, 10, 10]), budget, threads)
    ahead.start(fetches.fetch, fetches.delete)
    return ahead


def test_blocks_are_fetched_in_order_as_there_is_room_and_deleted_after_their_last_use():
    fetches = Fetches()
    ahead = ahead_of(fetches, budget=20)
    ahead.wait(0, [4, 2])
    ahead.finish(1)
    ahead.wait(2, [2, 7])
    assert fetches.log == [4, 2, -4, 7]
    ahead.finish(4)
    ahead.wait(5, [1])
    assert fetches.log == [4, 2, -4, 7, -2, -7, 1]
    ahead.close()
    assert fetches.log[-1] == -1


@pytest.mark.parametrize("threads", [1, 3])
def test_a_step_never_waits_for_room(threads):
    fetches = Fetches()
    ahead = ahead_of(fetches, budget=0, threads=threads)
    ahead.wait(1, [4, 2])
    ahead.wait(2, [2, 7])
    assert sorted(fetches.log) == [2, 4, 7]
    ahead.close()


def test_a_block_that_was_not_needed_after_all_is_not_fetched_late():
    fetches = Fetches()
    ahead = ahead_of(fetches, budget=10)
    ahead.wait(0, [4])
    ahead.finish(4)  # 2 and 7 were announced, but none of the rank's samples was in them
    ahead.wait(5, [1])
    ahead.close()
    assert [block for block in fetches.log if block in (2, 7)] == [-block for block in fetches.log if -block in (2, 7)]
    assert fetches.log[0] == 4
    assert fetches.log[-2:] == [1, -1]


def test_what_is_fetched_beyond_the_end_is_left_to_the_next_epoch():
    """A thread of the epoch before must not delete a file that this one has found in its place."""
    fetches, may_go_on = Fetches(), threading.Event()

    def fetch_slowly(block):
        fetches.fetch(block)
        may_go_on.wait()

    ahead = Prefetcher(USES, np.array([10, 10, 10, 10]), 100, 1)
    ahead.start(fetch_slowly, fetches.delete)
    fetches.ready.acquire()
    ahead.close()
    may_go_on.set()
    for thread in threading.enumerate():
        if thread.name.endswith("(_work)") and thread is not threading.current_thread():
            thread.join()
    assert fetches.log == [4]


def test_what_keeps_a_block_away_is_raised_where_it_is_waited_for():
    ahead = ahead_of(Fetches(fails=[2]), budget=100)
    with pytest.raises(DataError, match="block 2 is broken"):
        ahead.wait(0, [4, 2])


def test_the_bytes_that_are_needed_at_a_time():
    sizes = np.array([10, 20, 30, 40])
    assert needed_bytes(USES, sizes) == 50  # steps 2 and 3


def test_the_folder_may_be_in_the_users_home(monkeypatch, tmp_path):
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("DDP_CACHE_DIR", "~/cache")
    with cache_of() as cache:
        assert cache.root == tmp_path / "cache" / "ddp-blocks"
