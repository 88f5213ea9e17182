"""What a promotion is asked for, what its rank measures, and who is better. No torch."""

import math
from dataclasses import dataclass
from typing import Optional, Sequence

from flyte_ddp.engine.job import Job, Measured
from flyte_ddp.errors import InputError
from flyte_ddp.settings import Settings, setting

BETTER = ("auto", "higher", "lower")


@dataclass(frozen=True)
class PromotionOptions(Settings):
    """When a candidate is promoted.

    Attributes:
        measure: of the test split that decides; empty is the one that the recipe's trainings are judged by.
        better: whether a higher or a lower value is better; auto is as the recipe chooses its best epoch.
        margin: by more than this the candidate has to be better than the model that is promoted now.
        timeout_seconds: how long the measuring may go without a batch before it counts as hung.
    """

    measure: str = setting("")
    better: str = setting("auto", choices=BETTER)
    margin: float = setting(0.0, minimum=0)
    timeout_seconds: float = setting(300.0, minimum=1, maximum=86400)


@dataclass(frozen=True)
class Comparison:
    """The models to measure, of which the first one, the candidate, brings data and measures for all of them.

    current: the model that is promoted now, in words, for an error.
    """

    jobs: Sequence[Job]
    current: str


@dataclass(frozen=True)
class Verdict:
    """Whether the candidate is better, by which measure, and both scores; current is None where there is none."""

    measure: str
    higher: bool
    margin: float
    candidate: float
    current: Optional[float]

    @property
    def is_better(self) -> bool:
        if self.current is None or not math.isfinite(self.current):
            return True
        gain = self.candidate - self.current
        return (gain if self.higher else -gain) > self.margin


def judge(candidate: Measured, current: Optional[Measured], options: PromotionOptions) -> Verdict:
    """Raises InputError where the measure is none, or its better direction is not known, or it is not finite."""
    name = options.measure or candidate.headline
    if name not in candidate.measures:
        raise InputError(f"measure must be one of {', '.join(candidate.measures)}, got {name!r}")
    if options.better == "auto" and name not in candidate.is_lower_better:
        raise InputError(
            f'better must be "higher" or "lower" for the measure {name}, got "auto": say so, or add {name} to the '
            "recipe's higher_is_better or lower_is_better"
        )
    higher = options.better == "higher" or (options.better == "auto" and not candidate.is_lower_better[name])
    score = candidate.measures[name]
    if not math.isfinite(score):
        raise InputError(f"the candidate's {name} must be finite, got {score}: give a model that has learnt")
    return Verdict(name, higher, options.margin, score, current.measures[name] if current else None)
