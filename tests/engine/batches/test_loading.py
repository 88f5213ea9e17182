"""Loader workers: what they deliver, and that none of them stays."""

import os
import re
import shutil
import signal
import subprocess
import sys
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import TensorDataset

from benchmarks.faults import has_ended
from flyte_ddp.data.image_files import link_images
from flyte_ddp.data.prepared.prepared import open_split, read_description
from flyte_ddp.data.sources.datasets import prepare
from flyte_ddp.data.sources.image_index import index_folder, write_folder
from flyte_ddp.data.sources.image_settings import ImageSettings
from flyte_ddp.engine.batches.loading import Streamed, read_samples
from flyte_ddp.engine.load import make_split
from flyte_ddp.errors import DataError
from flyte_ddp.events import CheckpointFailed, RunStarted
from flyte_ddp.launch import launcher
from flyte_ddp.launch.environment import World
from flyte_ddp.launch.failures import RankError, RecoverableRankError
from flyte_ddp.settings import RunOptions
from tests.small_training import Trained, Unplugged, identical, unplug_at

TARGETS = "tests.engine.loading_targets"


@pytest.fixture(scope="module")
def digits(tmp_path_factory):
    """430 real digits as files: the training share of them makes seven batches of 50, the last one short."""
    folder = tmp_path_factory.mktemp("files") / "digits"
    images, labels = open_split(prepare("digits"), "train")
    write_folder(folder, [str(digit) for digit in range(10)], images[:430], labels[:430])
    return folder


def dataset(folder, image_size=28):
    images = ImageSettings(image_size=image_size, channels="grayscale" if image_size == 28 else "rgb")
    directory = index_folder(folder, folder.name, images, print)
    link_images(directory, folder)
    return str(directory)


def launch(function, argument, size=1, on_event=lambda event: None):
    world = World(size=size, local_size=size, backend="gloo", device="cpu")
    return launcher.launch(f"{TARGETS}:{function}", world, argument, 60, on_event)


def test_batches_depend_neither_on_workers_nor_on_ranks(digits):
    (alone,) = launch("read_an_epoch", (dataset(digits), 0))
    assert [len(images) for images, _ in alone[:-1]] == [50] * 6
    assert 0 < len(alone[-1][0]) < 50
    for size in (1, 2):
        ranks = launch("read_an_epoch", (dataset(digits), 2), size)
        for whole, *shares in zip(alone, *ranks, strict=True):
            for expected, *found in zip(whole, *shares, strict=True):
                assert np.array_equal(np.concatenate(found), expected)


class Prices(list):
    """Rows as JSON has them: 3 is a whole number, and 3.5 is not."""


def test_numbers_of_several_types_are_refused_as_a_batch_would_have_the_one_or_the_other():
    words = "Prices: samples must have numbers of one type, got float64 and int64: convert them in the Dataset"
    with pytest.raises(DataError, match=words):
        read_samples(Prices([3, 3.5]), np.arange(2))
    assert read_samples(Prices([3.0, 3.5]), np.arange(2)).dtype == np.float64


class Halved(TensorDataset):
    def __getitem__(self, index):
        return tuple(tensor[index] / 2 for tensor in self.tensors)


def test_a_dataset_of_tensors_with_a_transform_is_asked_for_its_samples():
    cache: Any = None  # for Blocks alone
    split = make_split(Halved(torch.ones(4, 2)), "train", torch.device("cpu"), RunOptions(), cache)
    assert isinstance(split, Streamed)


@pytest.mark.slow
def test_workers_and_a_restart_do_not_change_the_result(digits, train):
    def run(nproc: int, workers: int, **more) -> Trained:
        return train(nproc, data=dataset(digits), loader_workers=workers, learning_rate=0.02, log_interval=1, **more)

    plain = run(2, 2, name="plain")
    with pytest.raises(Unplugged):
        run(2, 2, name="unplugged", on_event=unplug_at(4), checkpoint_seconds=0)
    resumed = run(2, 0, name="unplugged")
    started = resumed.events[0]
    assert isinstance(started, RunStarted)
    assert started.first_step > 0
    assert identical(plain, resumed)


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_images_that_exceed_the_memory_can_be_read(digits):
    data = dataset(digits, image_size=512)  # 255 MiB in 340 images
    assert launch("read_with_little_memory", (data, 2)) == [read_description(data).train_samples]


def test_a_file_that_is_broken_later_ends_the_run_with_its_name(digits, tmp_path):
    data = dataset(digits)
    broken = sorted(digits.rglob("*.png"))[0]
    content = broken.read_bytes()
    broken.write_bytes(content[:50])
    try:
        with pytest.raises(RankError, match=rf"DataError: {broken} can no longer be read") as failed:
            launch("read_an_epoch", (data, 2))
    finally:
        broken.write_bytes(content)
    assert not isinstance(failed.value, RecoverableRankError)


def test_a_killed_loader_worker_is_worth_a_retry_and_one_that_is_asked_to_stop_goes_on(digits):
    data = dataset(digits)
    with pytest.raises(RecoverableRankError, match=r"DataLoader worker .*lower loader_workers"):
        launch("signal_a_worker", (data, 2, signal.SIGKILL))
    assert launch("signal_a_worker", (data, 2, signal.SIGTERM)) == [99]


LAUNCH = """
import sys
from flyte_ddp.launch import launcher
from flyte_ddp.launch.environment import World
def launch(function, *arguments, on_event=lambda event: None):
    world = World(size=1, local_size=1, backend="gloo", device="cpu")
    launcher.launch(f"tests.engine.loading_targets:{function}", world, arguments, 60, on_event)
"""
READER = f"""{LAUNCH}
try:
    launch("read_an_epoch", sys.argv[1], 2)
except Exception as error:
    print(error)
"""


@pytest.mark.slow
def test_shared_memory_that_is_full_is_named(digits):
    mounted = ["unshare", "--mount", "--map-root-user", "sh", "-ec"]
    mounted += ['mount -t tmpfs -o size=4k none /dev/shm && exec "$@"', "sh"]
    if not shutil.which("unshare") or subprocess.run([*mounted, "true"], capture_output=True).returncode:
        pytest.skip("needs a mount of its own, which this system's kernel or container does not allow")
    command = [*mounted, sys.executable, "-c", READER, dataset(digits)]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    said = subprocess.run(command, env=environment, check=True, stdout=subprocess.PIPE, text=True).stdout
    assert re.search(r"share /dev/shm, which is full or read-only: give .*, or set loader_workers, .*, to 0", said)


def test_loader_workers_end_with_a_killed_rank(digits, tmp_path):
    def kill_the_rank(event):
        if isinstance(event, CheckpointFailed):
            os.kill(pids(tmp_path)[0], signal.SIGKILL)

    with pytest.raises(RecoverableRankError, match="SIGKILL"):
        launch("load_and_wait", (dataset(digits), 3, str(tmp_path / "pids")), on_event=kill_the_rank)
    assert len(pids(tmp_path)) == 4
    assert all(has_ended(pid) for pid in pids(tmp_path))


PARENT = f"""{LAUNCH}
launch("load_and_wait", sys.argv[1], 3, sys.argv[2], on_event=lambda event: print(type(event).__name__, flush=True))
"""


@pytest.mark.slow
def test_loader_workers_end_with_a_killed_parent(digits, tmp_path):
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "TMPDIR": str(tmp_path)}
    command = [sys.executable, "-c", PARENT, dataset(digits), str(tmp_path / "pids")]
    pipe: Any = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with subprocess.Popen(command, env=environment, **pipe) as parent:
        assert parent.stdout is not None
        assert "CheckpointFailed\n" in iter(parent.stdout.readline, ""), "it ended before it was to be killed"
        parent.kill()
        # the ranks and their workers hold the pipe too: this returns when the last of them has ended
        assert parent.communicate(timeout=60)[1] == ""
    assert len(pids(tmp_path)) == 4
    assert all(has_ended(pid) for pid in pids(tmp_path))
    assert list(tmp_path.glob("ddp-*")) == []


def pids(folder):
    """Of the rank and of its loader workers."""
    return [int(pid) for pid in (folder / "pids").read_text().split()]
