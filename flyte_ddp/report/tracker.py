"""The interface of a tracker: what one run of it can do. A tracker is one module and one line in tracking.py."""

from collections.abc import Callable, Collection, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from flyte_ddp.errors import InputError
from flyte_ddp.report.predictions import Predictions
from flyte_ddp.report.record import RunInfo


class Tracker:
    """A run of a tracker, with which all attempts at a training go on.

    tracking.py decides which names and steps a method gets. A thread of its own calls all methods but __init__. What a
    tracker has no place for, its method leaves out.

    Attributes:
        label: the tracker's name in messages.
        module, remedy: the module that it needs, if that is an extra, and what to say where that is not installed.
    """

    label: str
    module = remedy = ""

    def __init__(self, info: RunInfo, on_url: Callable[[str], None]):
        """Check and read what other code may change later; connect to nothing.

        info: its options.tracking names the tracker. on_url: takes the run's URL once it is known.

        Raises InputError if something is missing.
        """
        if self.module and find_spec(self.module) is None:
            raise InputError(self.remedy)
        self.info = info
        self.on_url = on_url

    def open(self, parameters: Mapping[str, Any]) -> None:
        """Find the run that an earlier attempt has begun, or begin one. parameters: see run_parameters."""

    def has_logged(self, group: str, step: int) -> bool:
        """Whether an earlier attempt has logged this step of a group, see first_part."""
        return False

    def describe(self, world: Mapping[str, Any], layers: Sequence[tuple[str, str, int]]) -> None:
        """Tell what an attempt runs on. layers: name, type and number of parameters of each."""

    def log(self, step: int, values: Mapping[str, float | str]) -> None:
        """Log values by name at a step. The steps of a group rise."""

    def histograms(self, step: int, counted: Mapping[str, tuple[list[float], list[float]]]) -> None:
        """Log counts of n bins between n + 1 edges, by name."""

    def predictions(self, step: int, predictions: Predictions) -> None:
        """Show test images with what they were taken for."""

    def summary(self, values: Mapping[str, Any]) -> None:
        """Set values of the whole run by name."""

    def finish(self, has_succeeded: bool, report: Path) -> None:
        """Send what is still unsent; IncompleteError if something cannot be. report: the final page."""

    def abandon(self) -> None:
        """Give up finish(), which takes too long."""


def first_part(name: str) -> str:
    """Return the group of a name: train of train/loss. Each group counts its steps for itself."""
    return name.partition("/")[0]


def apart(taken: Collection[str], ours: Mapping[str, Any]) -> dict[str, Any]:
    """Return `ours`, each under a name that no setting or measure of the user's has already: recipe, or run.recipe."""
    return {f"run.{name}" if name in taken else name: value for name, value in ours.items()}
