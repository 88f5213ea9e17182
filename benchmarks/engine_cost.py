"""What the engine costs besides the step itself, and whether ranks are as fast as threads.

    python -m benchmarks.engine_cost --runs 5

Each run trains an epoch of MNIST in which every 20 steps are followed by 20 on one fixed batch in memory, in the same
processes: see benchmarks.stopwatch. One rank with all cores alternates with one rank per GPU, or two without GPUs.
"""

import argparse

from benchmarks.engine import hardware, spread, train
from benchmarks.stopwatch import Rates
from flyte_ddp.data.sources.datasets import prepare
from flyte_ddp.launch.environment import available_cores, choose_world
from flyte_ddp.recipes.hyperparameters import Hyperparameters

WORKER = "benchmarks.stopwatch:compare_with_fixed_batch"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--dataset", default="mnist")
    arguments = parser.parse_args()
    data = prepare(arguments.dataset)
    hp = Hyperparameters(epochs=1)
    world = choose_world(hp.backend, 0, hp.batch_size)
    rates: dict[int, list[Rates]] = {1: [], world.size: []}
    for number in range(arguments.runs):
        for ranks in sorted(rates, reverse=number % 2 == 1):
            rates[ranks].append(train(hp, data, ranks, worker=WORKER)[0])
    print(f"{hardware()}; {arguments.dataset}, batches of {hp.batch_size}, {world.backend}; n = {arguments.runs}\n")
    print("| ranks | threads of each | samples/s of an epoch | samples/s on one fixed batch | ratio, median [range] |")
    print("|---|---|---|---|---|")
    for ranks, found in rates.items():
        epoch, fixed = (spread(side, 0) for side in zip(*found, strict=True))
        ratio = spread([one.epoch / one.fixed_batch for one in found], 3)
        print(f"| {ranks} | {max(1, available_cores() // ranks)} | {epoch} | {fixed} | {ratio} |")
    if world.size > 1:
        ratio = spread([many.epoch / one.epoch for one, many in zip(rates[1], rates[world.size], strict=True)], 3)
        print(f"\nSamples per second of an epoch, {world.size} ranks / 1 rank, same global batch: {ratio}")


if __name__ == "__main__":
    main()
