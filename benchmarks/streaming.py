"""What reading blocks from an object storage costs, against the same samples in memory.

    python -m benchmarks.streaming --runs 3
    python -m benchmarks.streaming --only orders
    python -m benchmarks.streaming --small        # to see that it works; its figures say nothing

The storage is tests/object_storage.py, in a process of its own on this machine, so it takes cores from the training.
Orders are compared on MNIST sorted by class, in blocks of 512: the accuracy after an epoch, for each seed.
"""

import argparse
import json
import multiprocessing
import os
import resource
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.engine import hardware, percent, spread
from benchmarks.streamed_images import Settings
from flyte_ddp.data.blocks.block_folder import write_blocks
from flyte_ddp.data.blocks.blocks import Blocks
from flyte_ddp.data.prepared.prepared import open_split
from flyte_ddp.data.remote_files import use_storage_options
from flyte_ddp.data.sources.datasets import prepare
from flyte_ddp.engine.batches.batches import TrainBatches
from flyte_ddp.engine.batches.block_cache import BlockCache
from flyte_ddp.engine.batches.block_split import BlockSplit, Reading
from flyte_ddp.launch.environment import Environment, World
from flyte_ddp.settings import RunOptions
from flyte_ddp.training import train
from tests.object_storage import object_storage

WIDTHS = {"reading counts": 0, "computing counts": 16}  # channels of the network; 0 is one linear layer
SPLITS = ("train", "test")
PARTS = ("speeds", "first", "orders")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--small", action="store_true")
    parser.add_argument("--only", choices=PARTS, nargs="+", default=PARTS)
    arguments = parser.parse_args()
    print(f"{hardware()}; n = {arguments.runs}\n")
    runs, images = (1, 1000) if arguments.small else (arguments.runs, 20_000)
    if "speeds" in arguments.only:
        with local_storage() as options:
            use_storage_options({"s3": options})
            os.environ["FSSPEC_S3"] = json.dumps(options)  # for the ranks
            compare_speeds(images, runs)
    if "first" in arguments.only:
        begin_an_epoch(100 if arguments.small else 10_000)
    if "orders" in arguments.only:
        compare_orders(1 if arguments.small else 5, "digits" if arguments.small else "mnist")


# --- speed ---


@contextmanager
def local_storage() -> Iterator[dict[str, Any]]:
    """An object storage in a process of its own; yields fsspec's options for it."""
    ours, theirs = multiprocessing.Pipe()
    storage = multiprocessing.get_context("spawn").Process(target=serve, args=(theirs,), daemon=True)
    storage.start()
    try:
        yield {"key": "key", "secret": "word", "endpoint_url": ours.recv()}
    finally:
        storage.terminate()


def compare_speeds(images: int, runs: int) -> None:
    numbers = np.random.default_rng(0)
    for split, count in zip(SPLITS, (images, images // 5), strict=True):
        pixels = numbers.integers(0, 256, (count, 3, 64, 64), dtype=np.uint8)
        write_blocks(f"s3://bucket/{split}", (pixels, numbers.integers(0, 10, count)), max(1, images // 50))
    print("| | images per second from storage, median [range] | in memory | ratio |\n|---|---|---|---|")
    for name, width in WIDTHS.items():
        speeds: dict[str, list[float]] = {"s3://bucket": [], "memory:s3://bucket": []}
        for _ in range(runs):
            for source, found in speeds.items():
                found.append(speed(source, width))
        streamed, held = speeds.values()
        ratio = statistics.median(streamed) / statistics.median(held)
        print(f"| {name} | {spread(streamed, 0)} | {spread(held, 0)} | {ratio:.2f} |", flush=True)


def serve(connection: Connection) -> None:
    with object_storage() as server:
        connection.send(server.environment["FLYTE_AWS_ENDPOINT"])
        threading.Event().wait()


def speed(source: str, width: int) -> float:
    """Images per second of the training loop of the second epoch."""
    settings = Settings(source=source, width=width, epochs=2, precision="float32", log_interval=1000)
    options = RunOptions(nproc=1, tracking="off", resume=False)
    with tempfile.TemporaryDirectory() as folder:
        epoch = train("benchmarks.streamed_images:Images", settings, options, output=folder, on_event=print_no).epochs[
            1
        ]
    return epoch.samples / epoch.train_seconds


def print_no(event: Any) -> None:
    pass


# --- the first batch ---


def begin_an_epoch(count: int) -> None:
    """Of blocks of 1,000 small samples, which a function makes at once."""
    blocks = Blocks([1000] * count, lambda number: np.full((1000, 16), number, np.float32))
    environment = Environment(World(1, 1, "gloo", "cpu"), 0, 0, "", 1)
    before, started = peak(), time.perf_counter()
    with BlockCache(environment) as cache:
        split = BlockSplit(blocks, "train", Reading(cache, torch.device("cpu")))
        train = TrainBatches(split, 256, 1, 0, 1)
        opened = time.perf_counter() - started
        batches = train.epoch(0, len(train) // 2)
        next(batches)
        first = time.perf_counter() - started
        for _ in range(100):
            next(batches)
        del batches
    print(
        f"\n{count:,} blocks of 1,000: {opened:.2f} s to open, {first:.2f} s until the first batch of half an epoch, "
        f"{peak() - before:.0f} MB more at the most in 100 steps\n"
    )


def peak() -> float:
    """In MB, of this process."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e3


# --- the order ---


def compare_orders(seeds: int, dataset: str) -> None:
    print("| samples sorted by class | accuracy after an epoch, mean ± standard deviation [range] |\n|---|---|")
    with tempfile.TemporaryDirectory() as folder:
        for split in SPLITS:
            images, labels = open_split(prepare(dataset), split)
            order = np.argsort(labels, kind="stable")
            write_blocks(Path(folder, split), (np.asarray(images[order]), labels[order]), 512)
        orders = {"shuffled as a whole": ("memory:", 1), **{f"blocks, window {w}": ("", w) for w in (1, 256, 2048)}}
        for name, (prefix, window) in orders.items():
            accuracies = [accuracy(f"{prefix}{folder}", window, seed) for seed in range(1, seeds + 1)]
            print(f"| {name} | {percent(accuracies)} |", flush=True)


def accuracy(source: str, window: int, seed: int) -> float:
    """In per cent, of the test images after an epoch."""
    settings = Settings(
        source=source, channels=1, width=16, window=window, epochs=1, seed=seed, batch_size=64, precision="float32"
    )
    options = RunOptions(nproc=1, tracking="off", resume=False)
    with tempfile.TemporaryDirectory() as folder:
        result = train("benchmarks.streamed_images:Images", settings, options, output=folder, on_event=print_no)
    print(f"window {window}, seed {seed}: {result.tested}", file=sys.stderr)
    return 100 * result.tested["accuracy"]


if __name__ == "__main__":
    main()
