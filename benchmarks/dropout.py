"""One layer of dropout, forward and backward: drawn by position, and by torch itself.

python -m benchmarks.dropout --runs 5
"""

import argparse
import time
from contextlib import AbstractContextManager, nullcontext

import torch
from torch.nn import functional as F

from benchmarks.engine import hardware, spread
from flyte_ddp.batch_share import BatchShare
from flyte_ddp.engine.global_batch.mode import GlobalBatchMode

SHAPE, TIMES = (32, 128, 256), 20


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=5)
    runs = parser.parse_args().runs
    mode = GlobalBatchMode(BatchShare(0, SHAPE[0], SHAPE[0]))
    print(f"{hardware()}; {SHAPE}, p = 0.1, float32; n = {runs}\n")
    print("| threads | by position, ns per element | torch's own | ratio, median [range] |\n|---|---|---|---|")
    for threads in (1, 2):
        torch.set_num_threads(threads)
        found: dict[bool, list[float]] = {True: [], False: []}
        for _ in range(runs + 1):  # the first is a warm-up
            for is_ours, times in found.items():
                times.append(nanoseconds(mode.block(0) if is_ours else nullcontext()))
        ours, theirs = (times[1:] for times in found.values())
        ratio = spread([mine / other for mine, other in zip(ours, theirs, strict=True)], 2)
        print(f"| {threads} | {spread(ours, 1)} | {spread(theirs, 1)} | {ratio} |", flush=True)


def nanoseconds(block: AbstractContextManager[None]) -> float:
    """Per element, forward and backward."""
    features, slopes = torch.ones(SHAPE, requires_grad=True), torch.ones(SHAPE)
    with block:
        started = time.perf_counter()
        for _ in range(TIMES):
            F.dropout(features, 0.1).backward(slopes)
    return (time.perf_counter() - started) / TIMES / features.numel() * 1e9


if __name__ == "__main__":
    main()
