"""The U-Net with our train; the rest of what its user writes is the recipe in examples/segmentation."""

from segmentation.settings import Settings

from flyte_ddp.settings import RunOptions
from flyte_ddp.training import train


def main(settings: Settings, ranks: int) -> dict[str, float]:
    return train("segmentation.recipe:Segmentation", settings, RunOptions(nproc=ranks), output=".").epochs[-1].test


if __name__ == "__main__":
    main(Settings(), 2)
