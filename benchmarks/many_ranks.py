"""What a rank pays for the others: one rank among pretended ones, with 32 samples of its own in each step.

    python -m benchmarks.many_ranks --runs 3
    python -m benchmarks.many_ranks --runs 3 --virtual   # with as many virtual ranks

torch's fake process group pretends the other ranks, so nothing is exchanged; what remains is the rank's own work. Each
training is measured in a process of its own, with one thread: the median of its steps' processor time, which other
programs disturb less than the time that passes, and the peak memory.
"""

import argparse
import pkgutil
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import distributed

from benchmarks.engine import hardware, spread
from benchmarks.gpu_rows.training import IMAGES
from flyte_ddp.data.prepared.prepared import open_split
from flyte_ddp.data.sources.datasets import prepare
from flyte_ddp.data.sources.image_index import write_folder
from flyte_ddp.engine.batches.batches import TrainBatches
from flyte_ddp.engine.batches.loading import Streamed
from flyte_ddp.engine.batches.sample_seeds import NOWHERE
from flyte_ddp.engine.batches.splits import Resident
from flyte_ddp.engine.measures import augment
from flyte_ddp.engine.monitor.loss_monitor import LossMonitor
from flyte_ddp.engine.progress import Progress
from flyte_ddp.engine.state import TrainingState
from flyte_ddp.engine.step import ReplicatedStep
from flyte_ddp.launch.link import Link
from flyte_ddp.recipe import Recipe

EXAMPLES = Path(__file__).parents[1] / "examples"
WORLDS, VIRTUAL_WORLDS = (1, 8, 64, 512, 4096), (1, 8, 64, 512)
SAMPLES, STEPS = 32, 32


def digit_files(folder: Path) -> Path:
    """Digits as PNG files, in a folder for each class."""
    write_folder(folder, [str(digit) for digit in range(10)], *open_split(prepare("digits"), "test"))
    return folder


# Recipe, settings, those that differ from the defaults, and where the data come from
RECIPES: dict[str, tuple[str, str, dict[str, Any], Callable[[Path], Path | None]]] = {
    "charlm": ("charlm.recipe:CharLM", "charlm.settings:Settings", {"characters": 20_000}, lambda folder: None),
    "segmentation": (
        "segmentation.recipe:Segmentation", "segmentation.settings:Settings", {"images": 200}, lambda folder: None,
    ),
    "images": (IMAGES, "flyte_ddp.recipes.hyperparameters:Hyperparameters", {}, lambda folder: prepare("digits")),
    "resnet": ("resnet.recipe:ResNet", "resnet.settings:Settings", {"side": 64}, digit_files),
}  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--virtual", action="store_true", help="with as many virtual ranks as ranks")
    parser.add_argument("--only", nargs="*", default=[*RECIPES], choices=[*RECIPES])
    parser.add_argument("--one", nargs=2, metavar=("RECIPE", "RANKS"), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.one:
        with tempfile.TemporaryDirectory() as folder:
            print(*one_rank(arguments.one[0], int(arguments.one[1]), arguments.virtual, Path(folder)))
        return
    kind = ", as many virtual ranks as ranks" if arguments.virtual else ""
    print(f"{hardware()}; {SAMPLES} samples a rank, one thread{kind}; n = {arguments.runs}\n")
    print("| recipe | ranks | ms per step, median [range] | of one rank's, median [range] | peak MiB, median [range] |")
    print("|---|---|---|---|---|")
    for name in arguments.only:
        found: dict[int, Any] = {ranks: [] for ranks in (VIRTUAL_WORLDS if arguments.virtual else WORLDS)}
        for _ in range(arguments.runs):
            for ranks, of_world in found.items():
                of_world.append(measured(name, ranks, arguments.virtual))
        alone = [milliseconds for milliseconds, _ in found[1]]
        for ranks, of_world in found.items():
            times, memory = zip(*of_world, strict=True)
            ratios = [time / one for time, one in zip(times, alone, strict=True)]
            print(f"| {name} | {ranks:,} | {spread(times, 1)} | {spread(ratios)} | {spread(memory, 0)} |", flush=True)


def measured(name: str, ranks: int, is_virtual: bool) -> tuple[float, float]:
    command = [sys.executable, "-m", "benchmarks.many_ranks", "--one", name, str(ranks)]
    command += ["--virtual"] if is_virtual else []
    printed = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    milliseconds, mebibytes = printed.split()
    return float(milliseconds), float(mebibytes)


def one_rank(name: str, ranks: int, is_virtual: bool, folder: Path) -> tuple[float, float]:
    """Milliseconds of processor time per step, and peak MiB, of the rank in the middle."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    torch.set_num_threads(1)
    distributed.init_process_group("fake", rank=ranks // 2, world_size=ranks, store=FakeStore())
    sys.path.insert(0, str(EXAMPLES))
    kind, of_settings, changed, data = RECIPES[name]
    virtual_ranks = ranks if is_virtual else 0
    settings = pkgutil.resolve_name(of_settings)(**changed, batch_size=SAMPLES * ranks, virtual_ranks=virtual_ranks)
    recipe: Recipe = pkgutil.resolve_name(kind)(settings, data(folder))
    split = Repeated(recipe, SAMPLES * ranks * STEPS)
    batches = TrainBatches(
        split, settings.batch_size, 1, ranks // 2, ranks,
        augment=lambda *given: augment(recipe, *given), virtual_ranks=virtual_ranks,
    )  # fmt: skip
    model, device = recipe.model(), torch.device("cpu")
    state = TrainingState(
        recipe, model, names_of(recipe, model, batches), untold(device), batches, device,
        autocast=False, total_steps=STEPS,
    )  # fmt: skip
    if isinstance(state.parallel, ReplicatedStep):
        state.parallel.replicated.register_comm_hook(None, nothing_exchanged)
    state.parallel.train()
    times, steps = [], batches.steps(0)
    for _ in range(STEPS):
        started = time.process_time()
        state.train_step(next(steps), False)
        times.append(time.process_time() - started)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    return round(statistics.median(times[2:]) * 1e3, 1), round(peak)


class Repeated:
    """A split of many samples, which are those of a small one again and again."""

    remedy = ""

    def __init__(self, recipe: Recipe, count: int):
        data = recipe.data("train")
        of_files = isinstance(data, torch.utils.data.Dataset)
        self._split = Streamed(data, recipe.device, 0, False) if of_files else Resident(data, recipe.device)
        self._count, self.device = count, recipe.device

    def __len__(self) -> int:
        return self._count

    def fetch(self, parts: Any, origins: Any = NOWHERE) -> Any:
        return self._split.fetch((part % len(self._split) for part in parts), origins)


def untold(device: torch.device) -> Progress:
    """Return the progress of a training of which nobody hears."""
    return Progress(device, Link(), LossMonitor())


def names_of(recipe: Recipe, model: torch.nn.Module, batches: TrainBatches) -> tuple[str, ...]:
    batch = next(batches.epoch(0))
    recipe.share = replace(batch.share, alone=True)
    with torch.no_grad():
        names = recipe.measure(recipe.forward(model.eval(), batch.tree), batch.tree)
    recipe.share.alone = False
    model.train()
    return tuple(sorted(names, key=lambda name: name != "loss"))


def nothing_exchanged(_, bucket):  # torch insists on annotations of its own, or none
    done: torch.futures.Future[torch.Tensor] = torch.futures.Future()
    done.set_result(bucket.buffer())
    return done


if __name__ == "__main__":
    main()
