"""The trials of a sweep: every combination of some values, or combinations drawn at random."""

import dataclasses
import itertools
import math
import random
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, TypeAlias, TypeVar

from flyte_ddp.errors import InputError
from flyte_ddp.fields import Settings, setting
from flyte_ddp.lightning.settings import LightningSettings
from flyte_ddp.settings import TrainingSettings

AnySettings: TypeAlias = TrainingSettings | LightningSettings
T = TypeVar("T", bound=AnySettings)

MOST_TRIALS = 200


@dataclass(frozen=True)
class Sweep(Settings):
    """The settings to try. All other settings are those of the base."""

    values: dict = setting(  # noqa: RUF009 copied
        {"learning_rate": [0.05, 0.1, 0.2]},
        help="name of a setting -> list of the values to try or, in a random search, a Range to draw from.",
    )
    measure: str = setting("accuracy", help="the measure to compare trials by: accuracy, or a measure of the recipe.")
    largest: bool = setting(True, help="whether larger values of the measure are better.")
    search: str = setting("grid", choices=("grid", "random"), help="grid tries every combination, random draws them.")
    trials: int = setting(
        8, minimum=1, maximum=MOST_TRIALS, help="draws of a random search; duplicates are tried once."
    )
    seed: int = setting(1, minimum=0, maximum=2**32 - 1, help="of the random search.")
    reduction_factor: int = setting(
        1,
        minimum=1,
        maximum=MOST_TRIALS,
        help="of successive halving (flyte_ddp.sweep.halving): after each rung one trial in this many continues, the "
        "others are cut. 1 cuts none; 4 or more trains less than half of all epochs.",
    )
    concurrency: int = setting(
        4,
        minimum=1,
        maximum=MOST_TRIALS,
        help="number of trials that run at a time on a cluster, each in its own pod. A local run trains one after "
        "another, because the ranks of each use all cores.",
    )


@dataclass(frozen=True)
class Range(Settings):
    """A range to draw from, both ends included: uniformly or, with log, uniformly in the logarithm."""

    minimum: float = setting(0.0)
    maximum: float = setting(0.0)
    scale: str = setting("linear", choices=("linear", "log"))

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.minimum < self.maximum:
            raise InputError(f"Range.maximum must be above minimum ({self.minimum:g}), got {self.maximum:g}")
        if self.scale == "log" and self.minimum <= 0:
            raise InputError(f'Range.minimum must be above 0 if scale is "log", got {self.minimum:g}')


def trials_of(sweep: Sweep, base: T) -> list[T]:
    """Return the settings of each trial. Equal settings are listed once. Equal arguments give the same list.

    Args:
        sweep: the values to try.
        base: the settings that the trials have in common.

    Raises:
        InputError: a value is not valid for its setting; the sweep names no setting, or one that must be the same for
            all trials (dataset or validation_fraction); a grid has more than MOST_TRIALS (200) trials; or the sweep
            looks for the largest loss.
    """
    if not sweep.values:
        raise InputError('Sweep.values must name what to try, as in {"learning_rate": [0.05, 0.1]}')
    if sweep.measure == "loss" and sweep.largest:
        raise InputError("Sweep.largest must be false for the loss, got true: the largest is that of the worst trial")
    ends = {name: _ends(sweep, name, space) for name, space in sweep.values.items()}
    first = {name: values[0] for name, values in ends.items()}  # a rule may concern two settings
    for name, values in ends.items():
        for value in values:
            _with(base, {**first, name: value})
        if name in ("dataset", "validation_fraction"):
            raise InputError(
                f"Sweep.values must not name {name}: trials compare only on the same samples, so set it for all alike"
            )
    chosen = _grid(sweep) if sweep.search == "grid" else _draws(sweep, base)
    trials = (_with(base, dict(zip(sweep.values, values, strict=True))) for values in chosen)
    return list({trial.to_json(): trial for trial in trials}.values())  # settings may have a dict, which has no hash


def _ends(sweep: Sweep, name: str, space: Any) -> list[Any]:
    """Return a setting's whole list of values as it is, or the ends [minimum, maximum] of a range.

    Args:
        sweep: the sweep. Only a random search may have ranges.
        name: the name of the setting, for the message.
        space: the list, or the range as a dict.

    Raises:
        InputError: the list is empty, or `space` is neither a list nor an allowed range.
    """
    ends = space
    if sweep.search == "random" and isinstance(space, dict):
        drawn = Range.from_dict(space)
        ends = [drawn.minimum, drawn.maximum]
    if not isinstance(ends, list) or not ends:
        ranges = ', or a range such as {"minimum": 0.01, "maximum": 1, "scale": "log"}'
        allowed = "a list of values" + (ranges if sweep.search == "random" else "")
        raise InputError(f"Sweep.values.{name} must be {allowed}, got {space!r:.80}")
    return ends


# scikit-learn's ParameterGrid and ParameterSampler could replace the next two functions. But importing them adds 1.1 s
# and 75 MB to the 1.6 s and 102 MB of a pod that has 400Mi (scikit-learn 1.9), and they do not draw whole numbers.


def _grid(sweep: Sweep) -> Iterable[Any]:
    count = math.prod(len(values) for values in sweep.values.values())
    if count > MOST_TRIALS:
        raise InputError(
            f"Sweep.values must make at most {MOST_TRIALS} trials, got {count:,}: give fewer values, or draw some of "
            'the combinations with "search": "random"'
        )
    return itertools.product(*sweep.values.values())


def _draws(sweep: Sweep, base: AnySettings) -> Iterable[Any]:
    source = random.Random(sweep.seed)
    types = {field.name: field.type for field in dataclasses.fields(base)}
    for _ in range(sweep.trials):
        yield [_drawn(source.random(), space, types[name] in (int, "int")) for name, space in sweep.values.items()]


def _drawn(position: float, space: Any, whole: bool) -> Any:
    """Return the value at a relative position in a list or range.

    Args:
        position: from 0, the first value, to below 1.
        space: the list of values, or the range as a dict.
        whole: whether to round a number of a range to a whole one. If not, the number has four significant digits or,
            in a narrow range, as many as tell a thousand numbers apart.
    """
    if isinstance(space, list):
        return space[int(position * len(space))]
    drawn = Range.from_dict(space)
    margin = 0.5 if whole else 0.0  # gives the end values a full share
    least = drawn.minimum - margin
    most = drawn.maximum + margin
    value = least * (most / least) ** position if drawn.scale == "log" else least + (most - least) * position
    if whole:
        value = round(value)
    else:  # few digits can be read and retyped
        width = (drawn.maximum - drawn.minimum) / max(abs(drawn.maximum), abs(drawn.minimum))
        value = float(f"{value:.{max(4, 3 - math.floor(math.log10(width)))}g}")
    return min(max(value, drawn.minimum), drawn.maximum)


def _with(base: T, values: dict[str, Any]) -> T:
    made: Any = type(base).from_dict({**dataclasses.asdict(base), **values})
    return made
