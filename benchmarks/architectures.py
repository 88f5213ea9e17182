"""Other libraries' models as they come: accepted, killed and resumed, and the same bits by virtual ranks.

    make bench-models
    python -m benchmarks.architectures --virtual-ranks 6   # the same bits, on 1, 2 and 3 ranks

Small versions with random weights, their own dropout, and a drop path of 0.1 where they have one. Each takes 5 steps of
12 random samples in float32; images are large enough that batch norm has more than a few pixels to average over. Two
ranks that were killed after their first checkpoint, and resumed, are compared with two that were not, bit by bit. With
virtual ranks, 1, 2 and 3 ranks are.
"""

import argparse
import multiprocessing
import os
import signal
import tempfile
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from benchmarks.engine import hardware
from benchmarks.models import MODELS, Settings
from flyte_ddp.errors import InputError
from flyte_ddp.events import CheckpointWritten, Event
from flyte_ddp.launch.failures import RankError
from flyte_ddp.model_files.weights import read_weights
from flyte_ddp.settings import RunOptions
from flyte_ddp.training import train

SPAWN = multiprocessing.get_context("spawn")


def trained(
    name: str,
    ranks: int,
    folder: Path,
    on_event: Callable[[Event], None] = lambda event: None,
    virtual_ranks: int = 0,
) -> dict[str, Tensor]:
    options = RunOptions(nproc=ranks, checkpoint_seconds=0)
    settings = Settings(model=name, virtual_ranks=virtual_ranks)
    result = train("benchmarks.models:Classified", settings, options, output=folder, on_event=on_event)
    return read_weights(result.model_path, "model", "")


def kill_at_checkpoint(event: Event) -> None:
    if isinstance(event, CheckpointWritten):
        os.kill(os.getpid(), signal.SIGKILL)


def resumed(name: str, folder: Path) -> dict[str, Tensor]:
    """The weights of two ranks that were killed with their parent, and started again."""
    killed = SPAWN.Process(target=trained, args=(name, 2, folder, kill_at_checkpoint))
    killed.start()
    killed.join()
    assert killed.exitcode == -signal.SIGKILL, killed.exitcode
    return trained(name, 2, folder)


def show_bits(names: list[str], virtual_ranks: int) -> None:
    print(f"| architecture, {virtual_ranks} virtual ranks | 1, 2 and 3 ranks |\n|---|---|")
    for name in names:
        with tempfile.TemporaryDirectory() as folder:
            try:
                one, *others = (
                    trained(name, ranks, Path(folder, str(ranks)), virtual_ranks=virtual_ranks) for ranks in (1, 2, 3)
                )
            except (InputError, RankError) as error:
                print(f"| {name} | {str(error).splitlines()[0]} |", flush=True)
                continue
        is_same = all(torch.equal(other[key], weight) for other in others for key, weight in one.items())
        print(f"| {name} | {'the same bits' if is_same else 'OTHER BITS'} |", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", default=list(MODELS))
    parser.add_argument("--virtual-ranks", type=int, default=0)
    arguments = parser.parse_args()
    names = arguments.names
    if arguments.virtual_ranks:
        print(f"{hardware()}\n")
        return show_bits(names, arguments.virtual_ranks)
    print(f"{hardware()}\n\n| architecture | killed and resumed |\n|---|---|")
    for name in names:
        with tempfile.TemporaryDirectory() as folder:
            try:
                whole, again = trained(name, 2, Path(folder, "whole")), resumed(name, Path(folder, "killed"))
            except (InputError, RankError) as error:
                print(f"| {name} | {str(error).splitlines()[0]} |", flush=True)
                continue
        is_same = all(torch.equal(again[key], weight) for key, weight in whole.items())
        print(f"| {name} | {'the same bits' if is_same else 'OTHER BITS'} |", flush=True)


if __name__ == "__main__":
    main()
