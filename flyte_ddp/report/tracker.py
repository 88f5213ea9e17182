"""The interface of a tracker: what one run of it can do. A new tracker is one module and one line in tracking.py."""

from collections.abc import Callable, Collection, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from flyte_ddp.errors import InputError
from flyte_ddp.report.predictions import Predictions
from flyte_ddp.report.record import RunInfo


class Tracker:
    """A run of a tracker, which all attempts at a training continue.

    tracking.py decides which names and steps a method gets. A thread of its own calls all methods but __init__. A
    method does nothing if the tracker has no place for its values.

    Attributes:
        label: the tracker's name in messages.
        module: the module that the tracker needs, if the module is an extra.
        remedy: the message if that module is not installed.
        earlier: the last step of each group of values that earlier attempts have logged; open() fills it in.
    """

    label: str
    module = remedy = ""

    def __init__(self, info: RunInfo, on_url: Callable[[str], None]):
        """Check and read what other code may change later, and connect to nothing.

        Args:
            info: the run, whose options.tracking names the tracker.
            on_url: takes the run's URL once it is known.

        Raises:
            InputError: something is missing.
        """
        if self.module and find_spec(self.module) is None:
            raise InputError(self.remedy)
        self.info = info
        self.on_url = on_url
        self.earlier: dict[str, int] = {}

    def open(self, parameters: Mapping[str, Any]) -> None:
        """Find the run that an earlier attempt has begun, or begin one."""

    def has_logged(self, group: str, step: int) -> bool:
        """Return whether an earlier attempt has logged this step of a group; first_part returns a name's group."""
        return step <= self.earlier.get(group, -1)

    def describe(self, world: Mapping[str, Any], layers: Sequence[tuple[str, str, int]]) -> None:
        """Describe what an attempt runs on.

        Args:
            world: facts by name.
            layers: name, type and number of parameters of each layer.
        """

    def log(self, step: int, values: Mapping[str, float | str]) -> None:
        """Log values by name at a step. The steps of a group increase."""

    def histograms(self, step: int, counted: Mapping[str, tuple[list[float], list[float]]]) -> None:
        """Log counts of n bins between n + 1 edges, by name."""

    def predictions(self, step: int, predictions: Predictions) -> None:
        """Show test images with the classes that the network took them for."""

    def summary(self, values: Mapping[str, Any]) -> None:
        """Set values of the whole run, by name."""

    def finish(self, has_succeeded: bool, report: Path) -> None:
        """Send what is still unsent. Raises IncompleteError if something cannot be sent."""

    def abandon(self) -> None:
        """Give up a finish() that takes too long."""


def first_part(name: str) -> str:
    """Return the group of a name, such as train of train/loss. Each group counts its steps for itself."""
    return name.partition("/")[0]


def rename_taken(taken: Collection[str], ours: Mapping[str, Any]) -> dict[str, Any]:
    """Return `ours` under names that no setting or measure of the user's has: "recipe", or else "run.recipe"."""
    return {f"run.{name}" if name in taken else name: value for name, value in ours.items()}
