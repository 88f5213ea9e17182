"""What the engine adds to a loop as people write it: the same network, data, optimizer and batches, in one process.

    python -m benchmarks.bare_loop --runs 3

Every 20 steps of an epoch are followed by 20 of the bare loop, with a network, an optimizer and a loader of its own, so
that both meet the same load of the machine. With several ranks the bare loop has DistributedDataParallel.
"""

import argparse

from benchmarks.beside_bare import NETWORKS, BareSettings
from benchmarks.engine import hardware, spread, train
from benchmarks.stopwatch import BLOCK


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--only", nargs="+", default=list(NETWORKS))
    arguments = parser.parse_args()
    print(f"{hardware()}; batches of {BareSettings().batch_size}, AdamW; n = {arguments.runs}\n")
    print("| network | ranks | ms of a bare step | ms of the engine's | ratio, median [range] |")
    print("|---|---|---|---|---|")
    for network in arguments.only:
        for ranks in arguments.ranks:
            found = [measured(network, ranks) for _ in range(arguments.runs)]
            bare, ours = (spread([1e3 * one[side] for one in found], 2) for side in (1, 0))
            print(
                f"| {network} | {ranks} | {bare} | {ours} | {spread([one[0] / one[1] for one in found], 3)} |",
                flush=True,
            )


def measured(network: str, ranks: int) -> tuple[float, float]:
    """Seconds of a step: the median block's, of the engine and of the bare loop."""
    settings = BareSettings(network=network, epochs=1)
    pairs = train(
        settings, None, ranks, worker="benchmarks.beside_bare:alternate", recipe="benchmarks.beside_bare:Classifier"
    )[0]
    medians = [sorted(side)[len(side) // 2] / BLOCK for side in pairs]
    return medians[0], medians[1]


if __name__ == "__main__":
    main()
