"""A row of the table: a function of the machine that returns its result as text."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from flyte_ddp.launch.environment import World


class Missing(Exception):
    """The machine lacks what a row needs; the message says what."""


class Wrong(Exception):
    """A row found something other than expected."""


@dataclass(frozen=True)
class Machine:
    """Attributes:
    data: folder with the original files of MNIST and CIFAR-10, if there is one.
    place: for what the rows write.
    """

    gpus: int
    data: Path | None
    place: Path

    @property
    def device(self) -> str:
        return "cuda" if self.gpus else "cpu"

    def world(self, ranks: int = 2, backend: str = "gloo") -> World:
        return World(ranks, ranks, backend, self.device)

    def need_gpus(self, count: int = 1) -> None:
        if not self.gpus:
            raise Missing("no GPU")
        if self.gpus < count:
            raise Missing(f"needs {count} GPUs, there is one")


class Row(NamedTuple):
    """is_quick: whether it takes only seconds without a GPU, where no test in tests/ shows the same."""

    title: str
    check: Callable[[Machine], str]
    is_quick: bool = True


def expect(is_so: bool, otherwise: str) -> None:
    if not is_so:
        raise Wrong(otherwise)
