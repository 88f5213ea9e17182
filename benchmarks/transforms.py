r"""Other libraries' transforms, in Datasets as people write them: accepted, and the same bits on 1, 2 and 3 ranks.

    pip install albumentations audiomentations datasets h5py kornia monai opencv-python-headless pandas scikit-image \
        timm torch_geometric torchio transformers tsaug
    python -m benchmarks.transforms                  # in an hour on two cores: monai alone takes 20 s to be imported
    python -m benchmarks.transforms albumentations

Each trains on 1, 2 and 3 ranks, with 0 and 2 loader workers, for two epochs of random samples, with six virtual ranks.
Those marked * draw from generators of their own, which go on from sample to sample: the table has what they are
answered, and in the next row what comes of doing that.
"""

import argparse
import tempfile

from benchmarks.datasets import DATASETS, Settings
from benchmarks.engine import hardware
from flyte_ddp.errors import InputError
from flyte_ddp.launch.failures import RankError
from flyte_ddp.settings import RunOptions
from flyte_ddp.training import train

RUNS = tuple((ranks, workers) for ranks in (1, 2, 3) for workers in (0, 2))


def digest_of(name: str, ranks: int, workers: int) -> str:
    options = RunOptions(nproc=ranks, loader_workers=workers)
    with tempfile.TemporaryDirectory() as folder:
        recipe, settings = "benchmarks.datasets:Classified", Settings(dataset=name)
        return train(recipe, settings, options, output=folder, on_event=lambda event: None).digest


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", default=[""], help="parts of their names")
    names = [name for name in DATASETS if any(part in name for part in parser.parse_args().names)]
    print(f"{hardware()}\n\n| a Dataset with | on 1, 2 and 3 ranks, with 0 and 2 workers |\n|---|---|")
    for name in names:
        try:
            digests = {digest_of(name, *run) for run in RUNS}
            found = "the same bits" if len(digests) == 1 else "OTHER BITS"
        except (InputError, RankError) as error:
            found = str(error).splitlines()[0].split(": ", 3)[-1]
        print(f"| {name} | {found} |", flush=True)


if __name__ == "__main__":
    main()
