"""The language model with our train; the rest of what its user writes is the recipe in examples/charlm."""

from charlm.settings import Settings

from flyte_ddp.settings import RunOptions
from flyte_ddp.training import train


def main(settings: Settings, ranks: int) -> dict[str, float]:
    return train("charlm.recipe:CharLM", settings, RunOptions(nproc=ranks), output=".").epochs[-1].test


if __name__ == "__main__":
    main(Settings(), 2)
