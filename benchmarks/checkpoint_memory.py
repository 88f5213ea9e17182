"""What memory a checkpoint takes beside the state itself, when it is written and when training resumes from it.

    python -m benchmarks.checkpoint_memory --ranks 1 2 4

The network has 100 million parameters in tensors of at most 17 MB, the optimizer is AdamW: a state of 1.2 GB on each
rank. Counted is the memory that the kernel cannot take back: neither the file's pages in its cache nor those mapped.
"""

import argparse
import ctypes
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import torch
from torch import distributed, nn

from benchmarks.engine import hardware
from benchmarks.gpu_rows import training
from flyte_ddp.engine.batches.block_cache import BlockCache
from flyte_ddp.engine.checkpoints.resume import resume as resume_from
from flyte_ddp.engine.checkpoints.writer import make_checkpoints
from flyte_ddp.engine.job import Job
from flyte_ddp.engine.set_up import set_up
from flyte_ddp.launch.environment import Environment, choose_world
from flyte_ddp.launch.link import Link
from flyte_ddp.launch.process_group import process_group
from flyte_ddp.recipe import Recipe
from flyte_ddp.settings import TrainingSettings

NAME = "benchmarks.checkpoint_memory"  # also where this file is the program
WIDTH, DEPTH, SAMPLES = 2048, 24, 8
MEGABYTE = 1e6


class Large(Recipe):
    """Learns to return its input."""

    def data(self, split: str) -> torch.Tensor:
        return torch.linspace(-1, 1, SAMPLES * WIDTH).view(SAMPLES, WIDTH)

    def model(self) -> nn.Module:
        return nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(DEPTH)))

    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.AdamW(model.parameters(), 1e-5)

    def forward(self, model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
        outputs: torch.Tensor = model(batch)
        return outputs

    def measure(self, outputs: torch.Tensor, batch: torch.Tensor) -> dict[str, Any]:
        return {"loss": (outputs - batch).square().mean(1)}


class Peak:
    """The largest amount of memory within the block beyond that at its beginning, in bytes."""

    def __enter__(self) -> "Peak":
        ctypes.CDLL(None).malloc_trim(0)  # else freed memory would hide what is taken
        self.bytes, self._before, self._done = 0, resident(), threading.Event()
        self._thread = threading.Thread(target=self._watch)
        self._thread.start()
        return self

    def __exit__(self, *_: Any) -> None:
        self._done.set()
        self._thread.join()

    def _watch(self) -> None:
        while not self._done.wait(0.001):
            self.bytes = max(self.bytes, resident() - self._before)


def resident() -> int:
    """Bytes of memory that no file backs."""
    lines = (line.split() for line in Path("/proc/self/status").read_text().splitlines())
    return 1024 * sum(int(words[1]) for words in lines if words[0] in ("RssAnon:", "RssShmem:"))


def save(environment: Environment, link: Link, job: Job) -> tuple[float, ...]:
    """After one step, for the last of three: memory beside the state in MB, seconds that training stands still for, and
    seconds until it is on disk. The first may find a machine without free pages at hand."""
    with process_group(environment, job.options) as device:
        parts = set_up(environment, device, job, BlockCache(environment))
        parts.state.train_step(next(parts.train.steps(0)), False)
        progress = parts.state.progress
        progress.checkpoints = make_checkpoints(parts.state, environment, link.emit, job)
        for _ in range(3):
            with Peak() as peak:
                started = time.perf_counter()
                progress.save(parts.state)
                stood = time.perf_counter() - started
                progress.close()
        return peak.bytes / MEGABYTE, stood, time.perf_counter() - started


def resume(environment: Environment, link: Link, job: Job) -> tuple[float, ...]:
    """Memory in MB beside the state that there is then, and seconds."""
    with process_group(environment, job.options) as device:
        state = set_up(environment, device, job, BlockCache(environment)).state
        distributed.barrier()
        with Peak() as peak:
            started = time.perf_counter()
            assert resume_from(state, job, environment, link) is None
        moments = [value for kept in state.optimizer.state.values() for value in kept.values()]
        assert state.progress.step == 1
        assert moments
        mine = sum(value.nbytes for value in moments)
        return (peak.bytes - mine) / MEGABYTE, time.perf_counter() - started


def measure(target: str, ranks: int, folder: str) -> list[Any]:
    settings = TrainingSettings(batch_size=SAMPLES, precision="float32")
    world = choose_world("gloo", ranks, SAMPLES)
    return training.train(f"{NAME}:Large", settings, world, folder=folder, target=f"{NAME}:{target}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2, 4])
    print(f"{hardware()}\n")
    print("| ranks | saving: MB beside the state | stands still, s | on disk, s | resuming: MB beside the state | s |")
    print("|---|---|---|---|---|---|")
    for ranks in parser.parse_args().ranks:
        with tempfile.TemporaryDirectory() as folder:
            (saved, stood, written), *_ = measure("save", ranks, folder)
            resumed = measure("resume", ranks, folder)
        beside = " and ".join(f"{megabytes:.0f}" for megabytes, _ in resumed)
        print(f"| {ranks} | {saved:.0f} | {stood:.1f} | {written:.1f} | {beside} | {max(s for _, s in resumed):.1f} |")


if __name__ == "__main__":
    main()
