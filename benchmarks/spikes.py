"""Counts the updates that skip_spikes leaves out of sound trainings: `python -m benchmarks.spikes --seeds 4`."""

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "examples"))

from benchmarks.engine import train
from examples.charlm.settings import Settings as CharLM
from examples.segmentation.settings import Settings as Segmentation
from examples.tabular.settings import Settings as Tabular
from flyte_ddp.settings import TrainingSettings

JOBS: dict[str, type[TrainingSettings]] = {
    "charlm.recipe:CharLM": CharLM,
    "segmentation.recipe:Segmentation": Segmentation,
    "tabular.recipe:Tabular": Tabular,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=4)
    parser.add_argument("--deviations", type=float, nargs="+", default=[4.0, 6.0])
    arguments = parser.parse_args()
    print("| training | deviations | seeds | updates left out, by seed |\n|---|---|---|---|")
    for deviations in arguments.deviations:
        for recipe, settings in JOBS.items():
            counts = [
                train(settings(seed=seed, skip_spikes=deviations), None, 1, recipe=recipe)[0].skipped_updates
                for seed in range(1, arguments.seeds + 1)
            ]
            name = recipe.partition(".")[0]
            print(f"| {name} | {deviations:g} | {len(counts)} | {', '.join(map(str, counts))} |", flush=True)


if __name__ == "__main__":
    main()
