"""Other libraries' models as they come: accepted, and the same on 1, 2 and 3 ranks.

    make bench-models

Small versions with random weights, their own dropout, and a drop path of 0.1 where they have one. Each takes 5 steps of
12 random samples in float32; images are large enough that batch norm has more than a few pixels to average over. The
figures are the largest difference of a weight from that on one rank. The last is what rounding alone does: on one rank,
after images that are larger by the smallest factor that float32 can tell from 1.
"""

import argparse
import tempfile
from pathlib import Path

from torch import Tensor

from benchmarks.engine import hardware
from benchmarks.models import MODELS, Settings
from flyte_ddp.errors import InputError
from flyte_ddp.launch.failures import RankError
from flyte_ddp.settings import RunOptions
from flyte_ddp.training import train
from flyte_ddp.weights import read_weights

RUNS = ((1, 0.0), (2, 0.0), (3, 0.0), (1, 2.0**-23))  # ranks, and by what share images are larger


def trained(name: str, ranks: int, nudge: float, folder: Path) -> dict[str, Tensor]:
    options = RunOptions(nproc=ranks, tracking="off")
    result = train(
        "benchmarks.models:Classified",
        Settings(model=name, nudge=nudge),
        options,
        output=folder,
        on_event=lambda event: None,
    )
    return read_weights(result.model_path, "model", "")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", default=list(MODELS))
    names = parser.parse_args().names
    print(f"{hardware()}\n\n| architecture | 1 and 2 ranks | 1 and 3 ranks | rounding |\n|---|---|---|---|")
    for name in names:
        with tempfile.TemporaryDirectory() as folder:
            try:
                one, *others = (trained(name, *run, Path(folder, str(number))) for number, run in enumerate(RUNS))
            except (InputError, RankError) as error:
                print(f"| {name} | {str(error).splitlines()[0]} | | |", flush=True)
                continue
        gaps = (max(float((one[key].double() - other[key].double()).abs().max()) for key in one) for other in others)
        print(f"| {name} | {' | '.join(f'{gap:.1g}' for gap in gaps)} |", flush=True)


if __name__ == "__main__":
    main()
