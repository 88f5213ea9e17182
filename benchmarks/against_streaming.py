"""Reading an epoch from an object storage, against mosaicml-streaming.

The same images, shuffled, in batches, read ahead by loader workers; nothing is computed with them.

    python -m benchmarks.against_streaming --runs 5

It needs an xxhash below 4, which the lock has not: install it in a virtual environment for this alone. The storage is
that of benchmarks.streaming; each reader is a process of its own, with an empty cache. litdata 0.2.76 cannot be
compared like this: it reads by obstore, which wants https, and has no setting for that.
"""

import argparse
import multiprocessing
import os
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import fsspec
import numpy as np
import streaming
import torch

from benchmarks.engine import hardware, spread
from benchmarks.streaming import local_storage
from flyte_ddp.data.block_folder import BlockFolder, write_blocks
from flyte_ddp.data.stored import use_storage_options
from flyte_ddp.engine.batches import TrainBatches
from flyte_ddp.engine.block_cache import VARIABLE, BlockCache
from flyte_ddp.engine.block_split import BlockSplit, Reading
from flyte_ddp.launch.environment import Environment, World

SHAPE, ROWS, BATCH, WORKERS = (3, 64, 64), 1000, 128, 2
BLOCK_BYTES = ROWS * 3 * 64 * 64
Options = dict[str, Any]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--images", type=int, default=20_000)
    arguments = parser.parse_args()
    version = f"mosaicml-streaming {streaming.__version__}"
    print(f"{hardware()}; {version}; {arguments.images:,} images; n = {arguments.runs}\n")
    with local_storage() as options:
        write_all(arguments.images, options)
        found: dict[str, list[tuple[float, float]]] = {name: [] for name in READERS}
        for _ in range(arguments.runs):
            for name in READERS:
                with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as alone:
                    found[name].append(alone.submit(read_epoch, name, arguments.images, options).result())
    print("| | seconds until the first batch, median [range] | images per second after it | ours is faster by |")
    print("|---|---|---|---|")
    ours = [rate for _, rate in found["blocks"]]
    for name, runs in found.items():
        firsts, rates = zip(*runs, strict=True)
        ratios = [mine / other for mine, other in zip(ours, rates, strict=True)]  # of one round, under one load
        print(f"| {name} | {spread(firsts)} | {spread(rates, 0)} | {spread(ratios)} |")


def image_of(number: int) -> np.ndarray:
    return np.random.default_rng(number).integers(0, 256, SHAPE, dtype=np.uint8)


def write_all(images: int, options: Options) -> None:
    """The same samples in each reader's own format, in files of about one size."""
    use_storage_options({"s3": options})
    groups = (range(start, min(start + ROWS, images)) for start in range(0, images, ROWS))
    trees = ({"image": np.stack([*map(image_of, some)]), "number": np.array(some)} for some in groups)
    write_blocks("s3://bucket/blocks", trees, ROWS)
    storage = fsspec.filesystem("s3", **options)
    with tempfile.TemporaryDirectory() as folder:
        columns = {"image": f"ndarray:uint8:{','.join(map(str, SHAPE))}", "number": "int"}
        with streaming.MDSWriter(out=f"{folder}/mosaic", columns=columns, size_limit=BLOCK_BYTES) as writer:
            for number in range(images):
                writer.write({"image": image_of(number), "number": number})
        for path in Path(folder).glob("*/*"):
            storage.put_file(str(path), f"bucket/{path.relative_to(folder)}")


def read_epoch(name: str, images: int, options: Options) -> tuple[float, float]:
    """Seconds until the first batch, and images per second from then on."""
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as cache:
        started, total, first, count = time.perf_counter(), 0, 0.0, 0
        for numbers in READERS[name](options, cache):
            first, count = (first, count) if first else (time.perf_counter(), len(numbers))
            total += int(numbers.sum())
        seconds = time.perf_counter() - first
    assert total == images * (images - 1) // 2, "each image once"
    return first - started, (images - count) / seconds


def read_blocks(options: Options, cache: str) -> Iterator[torch.Tensor]:
    use_storage_options({"s3": options})
    os.environ[VARIABLE] = cache
    with BlockCache(Environment(World(1, 1, "gloo", "cpu"), 0, 0, "", 1)) as blocks:
        split = BlockSplit(BlockFolder("s3://bucket/blocks"), "train", Reading(blocks, torch.device("cpu"), WORKERS))
        yield from (batch.tree["number"] for batch in TrainBatches(split, BATCH, 1, 0, 1).epoch(0))


def read_mosaic(options: Options, cache: str) -> Iterator[torch.Tensor]:
    names = {"S3_ENDPOINT_URL": "endpoint_url", "AWS_ACCESS_KEY_ID": "key", "AWS_SECRET_ACCESS_KEY": "secret"}
    os.environ.update({variable: options[name] for variable, name in names.items()})
    data = streaming.StreamingDataset(remote="s3://bucket/mosaic", local=cache, shuffle=True, batch_size=BATCH)
    yield from (batch["number"] for batch in torch.utils.data.DataLoader(data, batch_size=BATCH, num_workers=WORKERS))


READERS: dict[str, Callable[[Options, str], Iterator[torch.Tensor]]] = {
    "blocks": read_blocks,
    "mosaicml-streaming": read_mosaic,
}

if __name__ == "__main__":
    main()
