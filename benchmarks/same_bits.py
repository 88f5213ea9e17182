"""The same bits on any number of ranks: digests of models by ranks, and what that costs.

    python -m benchmarks.same_bits                    # digests on 1, 2, 3 and 4 ranks
    python -m benchmarks.same_bits --costs --runs 3   # a step's time, of that of the same without virtual ranks
    python -m benchmarks.same_bits --audits --runs 3  # the same of audited steps, of those that are not
    python -m benchmarks.same_bits --accuracy --seeds 20   # final test losses and accuracies, also of as many ranks

Costs are ratios of medians of steps' times. Both sides run in the same processes, by turns of a few steps, so that both
meet the same load of the machine. The other side is the default: DistributedDataParallel, or one rank by itself. With
more virtual ranks than ranks it accumulates the gradients of as many micro-batches.
"""

import argparse
import hashlib
import pkgutil
import statistics
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from benchmarks.gpu_rows.training import IMAGES, train
from flyte_ddp.engine.audit import Audit
from flyte_ddp.engine.batches.block_cache import BlockCache
from flyte_ddp.engine.hosts.places import Place
from flyte_ddp.engine.job import Job
from flyte_ddp.engine.set_up import SetUp, set_up
from flyte_ddp.engine.virtual_ranks.exact_step import ExactStep
from flyte_ddp.engine.worker import configure_process
from flyte_ddp.launch.environment import Environment, World, visible_gpus
from flyte_ddp.launch.link import Link
from flyte_ddp.launch.process_group import process_group
from flyte_ddp.settings import TrainingSettings

PARTS, RANKS = 4, (1, 2, 3, 4)
MANY = 8  # ranks, and virtual ranks of one, of which the accuracy is looked at; they differ only in sums of gradients
# The test measure that accuracy is of, and settings with which the model learns in seconds
ACCURACIES: dict[str, tuple[str, dict[str, Any]]] = {
    "charlm": ("loss", {"characters": 100_000, "epochs": 4, "width": 32, "learning_rate": 0.01}),
    "cifar10": ("accuracy", {"model": "cifar_cnn", "epochs": 2, "train_fraction": 0.2}),
}
TURN, TURNS = 5, 12  # steps of one side before the other's, and how often
SETTINGS = "flyte_ddp.recipes.hyperparameters:Hyperparameters"
CIFAR10 = "flyte_ddp.recipes.hyperparameters:CIFAR10Hyperparameters"
# Recipe, its settings, and those that differ from the defaults
JOBS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "charlm": ("charlm.recipe:CharLM", "charlm.settings:Settings", {"characters": 20_000, "epochs": 1}),
    "U-Net": ("segmentation.recipe:Segmentation", "segmentation.settings:Settings", {"images": 400, "epochs": 1}),
    "mnist_cnn": (IMAGES, SETTINGS, {"model": "mnist_cnn", "epochs": 2}),
    "cifar10": (IMAGES, CIFAR10, {}),
    "resnet9": (IMAGES, SETTINGS, {"model": "resnet9", "epochs": 1, "train_fraction": 0.5}),
}


def settings_of(name: str, **more: Any) -> TrainingSettings:
    kind, changed = JOBS[name][1:]
    settings: TrainingSettings = pkgutil.resolve_name(kind)(precision="float32", **{**changed, **more})
    return settings


def data_of(name: str) -> str:
    if JOBS[name][0] != IMAGES:
        return ""
    from flyte_ddp.data.sources.datasets import prepare

    return str(prepare("cifar10" if JOBS[name][1] == CIFAR10 else "digits"))


def world(ranks: int) -> World:
    return World(ranks, ranks, "gloo", "cuda" if visible_gpus() else "cpu")


# --- digests ---


def show_digests(names: list[str]) -> None:
    heads = ["1 rank" if ranks == 1 else f"{ranks} ranks" for ranks in RANKS]
    print(f"| model, {PARTS} virtual ranks | {' | '.join(heads)} | |")
    print("|---|" + "---|" * (len(RANKS) + 1))
    unlike = []
    for name in names:
        digests = [digest(name, ranks) for ranks in RANKS]
        is_same = len({*digests}) == 1
        unlike += [] if is_same else [name]
        print(f"| {name} | {' | '.join(digests)} | {'the same' if is_same else 'OTHER BITS'} |", flush=True)
    if unlike:
        raise SystemExit(f"other bits on another number of ranks: {', '.join(unlike)}")


def digest(name: str, ranks: int) -> str:
    """Of the weights of a training by so many ranks."""
    with tempfile.TemporaryDirectory() as folder:
        train(JOBS[name][0], settings_of(name, virtual_ranks=PARTS), world(ranks), data_of(name), folder)
        weights = torch.load(Path(folder, "model.pt"), weights_only=True)
    content = b"".join(weight.contiguous().view(-1).view(torch.uint8).numpy().tobytes() for weight in weights.values())
    return hashlib.sha256(content).hexdigest()[:16]


# --- accuracy ---


def show_accuracy(names: list[str], seeds: int) -> None:
    for name in names:
        measure = ACCURACIES[name][0]
        print(f"| {measure} of {name}, {seeds} seeds | mean ± standard deviation | range |\n|---|---|---|")
        plain, exact = list[float](), list[float]()
        for seed in range(1, seeds + 1):
            plain.append(final(name, MANY, 0, seed))
            exact.append(final(name, 1, MANY, seed))
            print(f"{name}, seed {seed}: {plain[-1]:.5f} without, {exact[-1]:.5f} with", file=sys.stderr, flush=True)
        gaps = [with_parts - without for with_parts, without in zip(exact, plain, strict=True)]
        rows = {f"{MANY} ranks": plain, f"1 rank, {MANY} virtual ranks": exact, "difference by seed": gaps}
        for kind, values in rows.items():
            print(
                f"| {kind} | {statistics.mean(values):.5f} ± {statistics.stdev(values):.5f} "
                f"| {min(values):.5f} to {max(values):.5f} |",
                flush=True,
            )


def final(name: str, ranks: int, parts: int, seed: int) -> float:
    """Return the test measure at the end of a training by so many ranks and virtual ranks."""
    measure, changed = ACCURACIES[name]
    settings = settings_of(name, virtual_ranks=parts, seed=seed, **changed)
    result = train(JOBS[name][0], settings, world(ranks), data_of(name))[0]
    value: float = result.epochs[-1].test[measure]
    return value


# --- costs ---


def show_costs(names: list[str], runs: int) -> None:
    print("| model | ranks | virtual ranks | ms per step | of that without, median [range] | steps added up again |")
    print("|---|---|---|---|---|---|")
    for name in names:
        for ranks, parts in ((2, 2), (2, 8), (1, 1), (1, 4)):
            settings = settings_of(name, virtual_ranks=parts)
            target = "benchmarks.same_bits:compare"
            found = [train(JOBS[name][0], settings, world(ranks), data_of(name), target=target)[0] for _ in range(runs)]
            times, ratios, again = zip(*found, strict=True)
            ratio = f"{statistics.median(ratios):.3f} [{min(ratios):.3f}-{max(ratios):.3f}]"
            print(
                f"| {name} | {ranks} | {parts} | {statistics.median(times):.1f} | {ratio} | {sum(again)} |", flush=True
            )


def show_audits(names: list[str], runs: int) -> None:
    print("| model | ranks | virtual ranks | ms per audited step | of one that is not, median [range] |")
    print("|---|---|---|---|---|")
    for name in names:
        for parts in (2, 8):
            settings, target = settings_of(name, virtual_ranks=parts), "benchmarks.same_bits:compare_audited"
            found = [train(JOBS[name][0], settings, world(2), data_of(name), target=target)[0] for _ in range(runs)]
            times, ratios = zip(*found, strict=True)
            ratio = f"{statistics.median(ratios):.2f} [{min(ratios):.2f}-{max(ratios):.2f}]"
            print(f"| {name} | 2 | {parts} | {statistics.median(times):.1f} | {ratio} |", flush=True)


def compare(environment: Environment, link: Link, job: Job) -> tuple[float, float, int]:
    """Return a step's milliseconds by virtual ranks, the ratio to the default's, and how many were added up again."""
    configure_process(environment, job)
    with process_group(environment, job.options) as device:
        exact = set_up(environment, device, job, BlockCache(environment))
        plain = set_up(
            environment, device, replace(job, settings=replace(job.settings, virtual_ranks=0)), BlockCache(environment)
        )
        size = job.settings.batch_size // job.settings.virtual_ranks
        plain.state.micro_batch = size if job.settings.virtual_ranks > environment.world.size else 0
        seconds, ratio = by_turns(exact, plain, device, link)
        assert isinstance(exact.state.parallel, ExactStep)
        return seconds * 1e3, ratio, exact.state.parallel.repeated


def compare_audited(environment: Environment, link: Link, job: Job) -> tuple[float, float]:
    """Milliseconds of a step that is audited, and the ratio to one that isn't."""
    configure_process(environment, job)
    with process_group(environment, job.options) as device:
        audited, plain = (set_up(environment, device, job, BlockCache(environment)) for _ in range(2))
        assert isinstance(audited.state.parallel, ExactStep)
        places = [Place("host", "device")] * environment.world.size
        audited.state.audit = Audit(audited.state.parallel, audited.train, 1, places, print)
        seconds, ratio = by_turns(audited, plain, device, link)
        return seconds * 1e3, ratio


def by_turns(one: SetUp, other: SetUp, device: torch.device, link: Link) -> tuple[float, float]:
    """Seconds of a step of the first, and their ratio to the other's."""
    times: tuple[list[float], list[float]] = [], []
    steps = [steps_of(side) for side in (one, other)]
    for _ in range(TURNS):
        for side, following, seconds in zip((one, other), steps, times, strict=True):
            for _ in range(TURN):
                shares = next(following)
                started = clock(device)
                side.state.train_step(shares, False)
                seconds.append(clock(device) - started)
            link.heartbeat()
    medians = [statistics.median(seconds[TURN:]) for seconds in times]
    return medians[0], medians[0] / medians[1]


def steps_of(side: SetUp) -> Any:
    side.state.parallel.train()
    while True:
        side.state.progress.step = 0
        for shares in side.train.steps(0):
            if shares[0].share.size == side.train.batch_size:
                yield shares


def clock(device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--costs", action="store_true", help="measure steps instead of comparing digests")
    parser.add_argument("--audits", action="store_true", help="measure audited steps instead")
    parser.add_argument("--accuracy", action="store_true", help="compare final losses instead")
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--seeds", type=int, default=10)
    parser.add_argument("--only", nargs="*", default=[], choices=[*JOBS])
    arguments = parser.parse_args()
    sys.path.insert(0, str(Path(__file__).parents[1] / "examples"))
    names = arguments.only or [name for name in JOBS if name != "cifar10"]
    device = torch.cuda.get_device_name() if visible_gpus() else f"CPU, {torch.backends.cpu.get_cpu_capability()}"
    print(f"{device}; torch {torch.__version__}, one thread a rank\n", flush=True)
    if arguments.accuracy:
        show_accuracy(arguments.only or [*ACCURACIES], arguments.seeds)
    elif arguments.audits:
        show_audits(names, arguments.runs)
    elif arguments.costs:
        show_costs(names, arguments.runs)
    else:
        show_digests(names)


if __name__ == "__main__":
    main()
