"""The sentences with our train; the rest of what its user writes is the recipe in examples/finetune_text."""

from finetune_text.settings import Settings

from flyte_ddp.settings import RunOptions
from flyte_ddp.training import train


def main(settings: Settings, ranks: int) -> dict[str, float]:
    options = RunOptions(nproc=ranks, loader_workers=0)
    return train("finetune_text.recipe:FinetuneText", settings, options, output=".", init="encoder").epochs[-1].test


if __name__ == "__main__":
    main(Settings(), 2)
