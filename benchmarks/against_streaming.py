"""Reading an epoch of images in blocks, against mosaicml-streaming and litdata, and against the same images in memory.

The same images, shuffled, in batches; the others read ahead by loader workers. Nothing is computed with them.

    uv venv .venv-streaming
    uv pip install --python .venv-streaming -r requirements-dev.txt
    uv pip install --python .venv-streaming mosaicml-streaming==0.10.0 litdata==0.2.76
    .venv-streaming/bin/python -m benchmarks.against_streaming --runs 5

The third command replaces packages of the lock by older ones, hence an environment of its own. The readers take turns,
each in a process of its own with an empty cache. They read from a folder, which all three copy to their caches, and
from the storage of benchmarks.streaming, whose process takes its share of the cores. litdata cannot read the latter:
its obstore refuses http unless ClientConfig has allow_http, which litdata doesn't set. We compare each block's SHA-256;
the others don't by default.
"""

import argparse
import json
import multiprocessing
import os
import resource
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from itertools import product
from pathlib import Path
from typing import NamedTuple

import fsspec
import litdata
import numpy as np
import streaming
import torch
from torch.utils.data import DataLoader

from benchmarks.engine import hardware, spread
from benchmarks.streaming import local_storage
from flyte_ddp.data.blocks.block_folder import BlockFolder, write_blocks
from flyte_ddp.engine.batches.batches import TrainBatches
from flyte_ddp.engine.batches.block_cache import VARIABLE, BlockCache
from flyte_ddp.engine.batches.block_split import BlockSplit, Reading
from flyte_ddp.engine.batches.splits import Resident
from flyte_ddp.launch.environment import Environment, World

SHAPE, ROWS, BATCH, WORKERS = (3, 64, 64), 1000, 128, 2
BLOCK_BYTES = ROWS * 3 * 64 * 64
STORAGE = "s3://bucket"
CPU = torch.device("cpu")


class Read(NamedTuple):
    """first: seconds until the first batch. rate: images per second of the whole epoch, with those seconds. cpu:
    microseconds of CPU time per image, of the reader and its workers."""

    first: float
    rate: float
    cpu: float


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--images", type=int, default=20_000)
    arguments = parser.parse_args()
    versions = f"mosaicml-streaming {streaming.__version__}, litdata {litdata.__version__}"
    print(f"{hardware()}; {versions}; {arguments.images:,} images; n = {arguments.runs}\n")
    with local_storage() as options, tempfile.TemporaryDirectory() as folder:
        # for those that read, which are processes of their own
        os.environ["FSSPEC_S3"] = json.dumps(options)
        names = {"S3_ENDPOINT_URL": "endpoint_url", "AWS_ACCESS_KEY_ID": "key", "AWS_SECRET_ACCESS_KEY": "secret"}
        os.environ.update({variable: options[name] for variable, name in names.items()})
        write_all(arguments.images, folder)
        fsspec.filesystem("s3", **options).put(f"{folder}/", "bucket/", recursive=True)
        found: dict[tuple[str, str], list[Read | None]] = {(name, folder): [] for name in READERS}
        found.update({(name, STORAGE): [] for name in ("blocks", "mosaicml-streaming")})
        for _, (one, runs) in product(range(arguments.runs), found.items()):
            with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as alone:
                try:
                    runs.append(alone.submit(read_epoch, *one, arguments.images).result())
                except Exception as error:
                    print(f"{one[0]}, from {one[1]}: {type(error).__name__}", file=sys.stderr)
                    runs.append(None)
    print(
        "| | from | seconds until the first batch | images per second | CPU µs per image | ours is faster by | failed |"
    )
    print("|---|---|---|---|---|---|---|")
    for (name, root), runs in found.items():
        # of one round, under one load
        both = [(mine, one) for mine, one in zip(found["blocks", root], runs, strict=True) if mine and one]
        firsts, rates, costs = zip(*(one for _, one in both), strict=True)
        ratios = [mine.rate / one.rate for mine, one in both]
        columns = (spread(firsts), spread(rates, 0), spread(costs, 0), spread(ratios), str(runs.count(None)))
        print(f"| {name} | {'storage' if root == STORAGE else 'folder'} | {' | '.join(columns)} |")


def image_of(number: int) -> np.ndarray:
    return np.random.default_rng(number).integers(0, 256, SHAPE, dtype=np.uint8)


def sample_of(number: int) -> dict[str, object]:
    return {"image": image_of(number), "number": number}


def write_all(images: int, folder: str) -> None:
    """The same samples in each reader's own format, in files of about one size."""
    groups = (range(start, min(start + ROWS, images)) for start in range(0, images, ROWS))
    trees = ({"image": np.stack([*map(image_of, some)]), "number": np.array(some)} for some in groups)
    write_blocks(f"{folder}/blocks", trees, ROWS)
    columns = {"image": f"ndarray:uint8:{','.join(map(str, SHAPE))}", "number": "int"}
    with streaming.MDSWriter(out=f"{folder}/mosaic", columns=columns, size_limit=BLOCK_BYTES) as writer:
        for number in range(images):
            writer.write(sample_of(number))
    litdata.optimize(sample_of, [*range(images)], f"{folder}/litdata", chunk_bytes=BLOCK_BYTES, num_workers=1)


def read_epoch(name: str, root: str, images: int) -> Read:
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as cache:
        batches = READERS[name](root, cache)
        started, cpu, total, first = time.perf_counter(), cpu_seconds(), 0, 0.0
        for numbers in batches:
            first = first or time.perf_counter()
            total += int(numbers.sum())
        ended = time.perf_counter()
        del batches  # with its workers
    assert total == images * (images - 1) // 2, "each image once"
    return Read(first - started, images / (ended - started), (cpu_seconds() - cpu) / images * 1e6)


def cpu_seconds() -> float:
    """Of this process, and of those of its workers that have ended."""
    usages = map(resource.getrusage, (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return sum(usage.ru_utime + usage.ru_stime for usage in usages)


def read_memory(root: str, cache: str) -> Iterator[torch.Tensor]:
    blocks = BlockFolder(f"{root}/blocks")
    paths = [Path(cache, str(number)) for number in range(len(blocks.lengths))]
    for number, path in enumerate(paths):
        blocks.fetch(number, path)
    rows = np.concatenate([*map(np.load, paths)])
    held = Resident({name: np.ascontiguousarray(rows[name]) for name in ("image", "number")}, CPU)
    return (batch.tree["number"] for batch in TrainBatches(held, BATCH, 1, 0, 1).epoch(0))


def read_blocks(root: str, cache: str) -> Iterator[torch.Tensor]:
    os.environ[VARIABLE] = cache
    with BlockCache(Environment(World(1, 1, "gloo", "cpu"), 0, 0, "", 1)) as blocks:
        split = BlockSplit(BlockFolder(f"{root}/blocks"), "train", Reading(blocks, CPU))
        yield from (batch.tree["number"] for batch in TrainBatches(split, BATCH, 1, 0, 1).epoch(0))


def read_mosaic(root: str, cache: str) -> Iterator[torch.Tensor]:
    data = streaming.StreamingDataset(remote=f"{root}/mosaic", local=cache, shuffle=True, batch_size=BATCH)
    yield from (
        batch["number"] for batch in DataLoader(data, BATCH, num_workers=WORKERS, multiprocessing_context="fork")
    )


def read_litdata(root: str, cache: str) -> Iterator[torch.Tensor]:
    data = litdata.StreamingDataset(f"local:{root}/litdata", cache_dir=cache, shuffle=True)
    loader = litdata.StreamingDataLoader(data, batch_size=BATCH, num_workers=WORKERS, multiprocessing_context="fork")
    yield from (batch["number"] for batch in loader)


READERS: dict[str, Callable[[str, str], Iterator[torch.Tensor]]] = {
    "memory": read_memory,
    "blocks": read_blocks,
    "mosaicml-streaming": read_mosaic,
    "litdata": read_litdata,
}

if __name__ == "__main__":
    main()
