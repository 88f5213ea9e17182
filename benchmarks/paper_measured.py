"""Measures the constants of paper_model that this machine can give, and how well the model predicts its steps.

Computing is measured with one rank (on CPUs: on one core) at two batch sizes, the all-reduce with two ranks at two
sizes. From these the model predicts steps of 128 images with 2 and 4 ranks, which are then measured too.
"""

import os
import statistics
import subprocess
import sys
import time
from contextlib import suppress
from dataclasses import replace
from typing import Any, Dict, Iterator, List, Sequence, Tuple

from benchmarks.engine import hardware, spread, train
from benchmarks.paper_model import H100, MNIST, Links, Network, step
from flyte_ddp.data.datasets import prepare
from flyte_ddp.events import Event, StepLogged
from flyte_ddp.launch import launcher
from flyte_ddp.launch.environment import Environment, available_cores, choose_world, visible_gpus
from flyte_ddp.recipes.hyperparameters import Hyperparameters

RUNS, INTERVALS, TOTAL = 5, 7, 128
SIZES = 4096, 1_724_320  # bytes to reduce; the larger one is the MNIST network's 431,080 parameters


class Enough(Exception):
    """Ends a training whose steps have been timed."""


def measure() -> Tuple[Network, Links, str]:
    """Network and links, with values measured on GPUs in place of cited ones, and a text about all of them."""
    gpus, cores = visible_gpus(), available_cores()
    batches = (128, 1024) if gpus else (TOTAL // 4, TOTAL // 2)
    worlds = [ranks for ranks in (2, 4) if not gpus or ranks <= gpus]
    rounds = [  # in turns, so that a machine that slows down for a while affects everything alike
        (
            [seconds_alone(batch) for batch in batches],
            [seconds_of_a_step(TOTAL, ranks) for ranks in worlds],
            all_reduce_seconds() if worlds else [],
        )
        for _ in range(RUNS)
    ]
    alone, together, reduced = (list(zip(*part, strict=True)) for part in zip(*rounds, strict=True))
    network, links = fit_network(batches, alone), fit_links(H100 if gpus else Links(0, 1), reduced) if worlds else H100
    if not gpus:  # gloo needs the cores that compute, so no communication is hidden
        network = replace(network, buckets=((SIZES[1], 1.0),))
    taken = zip(batches, alone, strict=True)
    lines = [
        f"\nMeasured: {hardware()}; n = {RUNS}, load {os.getloadavg()[0]:.1f}\n",
        f"- computing on one {'GPU' if gpus else 'core'}: {1e3 * network.fixed:.2f} ms a step and "
        f"{1e6 * network.per_image:.1f} us an image, from steps of "
        + " and ".join(f"{size} in {spread(_ms(seconds))} ms" for size, seconds in taken),
    ]
    if worlds:
        lines.append(f"- all-reduce of two ranks: {1e6 * links.latency:.0f} us and {links.bandwidth / 1e9:.2f} GB/s\n")
        lines += predicted_and_measured(network, links, dict(zip(worlds, together, strict=True)), gpus or cores)
    if not gpus:
        return MNIST, H100, "\n".join(lines)
    return network, links, "\n".join([*lines, "", "The table uses these in place of assumed or cited values."])


def predicted_and_measured(
    network: Network, links: Links, together: Dict[int, Tuple[float, ...]], places: int
) -> Iterator[str]:
    """Lines of a table; together: for each number of ranks, the steps' seconds; places: GPUs, or cores."""
    yield "| ranks | images each | predicted ms | measured ms, median [range] | predicted / measured |"
    yield "|---|---|---|---|---|"
    for ranks, seconds in together.items():
        crowd = max(1, ranks / places)  # ranks that take turns
        crowded = replace(network, fixed=crowd * network.fixed, per_image=crowd * network.per_image)
        predicted = step(ranks, TOTAL / ranks, crowded, links)
        ratio = predicted / statistics.median(seconds)
        yield f"| {ranks} | {TOTAL // ranks} | {1e3 * predicted:.2f} | {spread(_ms(seconds))} | {ratio:.2f} |"


def fit_network(batches: Tuple[int, int], seconds: Sequence[Tuple[float, ...]]) -> Network:
    small, large = map(statistics.median, seconds)
    per_image = max(0.0, (large - small) / (batches[1] - batches[0]))
    return replace(MNIST, per_image=per_image, fixed=max(0.0, small - per_image * batches[0]))


def fit_links(links: Links, seconds: Sequence[Tuple[float, ...]]) -> Links:
    """The links between two ranks, for which 2 (N - 1) / N is 1."""
    small, large = map(statistics.median, seconds)
    return replace(links, latency=small, bandwidth=(SIZES[1] - SIZES[0]) / max(1e-9, large - small))


def seconds_alone(batch: int) -> float:
    """A step of one rank, on one core if there is no GPU."""
    command = [sys.executable, "-m", "benchmarks.paper_measured", str(batch)]
    return float(subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout)


def seconds_of_a_step(batch: int, ranks: int) -> float:
    """Step time of the project's own training, on digits: the median of some tens of steps."""
    taken: List[float] = []

    def note(event: Event) -> None:
        if isinstance(event, StepLogged):
            taken.append(batch / event.samples_per_second)
            if len(taken) > INTERVALS:
                raise Enough

    hp = Hyperparameters(dataset="digits", batch_size=batch, learning_rate=1e-3, log_interval=20)
    with suppress(Enough):
        train(hp, prepare("digits"), ranks, on_event=note)
    return statistics.median(taken[1:])


def all_reduce_seconds() -> List[float]:
    """Of two ranks, for each of SIZES."""
    target = "benchmarks.paper_measured:reduce_as_a_rank"
    return launcher.launch(target, choose_world("auto", 2, 2), None, 120, lambda event: None)[0]


def reduce_as_a_rank(environment: Environment, link: Any, argument: Any) -> List[float]:
    import torch

    from flyte_ddp.launch.process_group import process_group  # imports torch

    torch.set_num_threads(environment.threads)
    with process_group(environment, 60) as device:
        return [_median_seconds(torch.ones(size // 4, device=device)) for size in SIZES]


def _median_seconds(tensor: Any, repetitions: int = 50) -> float:
    from torch import distributed

    taken = []
    for _ in range(repetitions):
        distributed.barrier()
        started = time.perf_counter()
        distributed.all_reduce(tensor)
        float(tensor[0])  # waits for a GPU
        taken.append(time.perf_counter() - started)
    return statistics.median(taken)


def _ms(seconds: Tuple[float, ...]) -> List[float]:
    return [1e3 * value for value in seconds]


if __name__ == "__main__":
    if not visible_gpus():
        os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    print(seconds_of_a_step(int(sys.argv[1]), 1))
