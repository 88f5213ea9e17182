"""The options of a promotion, the models that its rank measures, and the verdict. No torch."""

import math
from dataclasses import dataclass

from flyte_ddp.engine.job import Measured
from flyte_ddp.errors import InputError
from flyte_ddp.fields import Settings, setting

BETTER = ("auto", "higher", "lower")


@dataclass(frozen=True)
class PromotionOptions(Settings):
    """The options that say when a candidate is promoted."""

    measure: str = setting("", help="the measure on the test split that decides; empty is the recipe's headline.")
    better: str = setting(
        "auto",
        choices=BETTER,
        help="whether a higher or a lower value is better; auto is as for the recipe's best epoch.",
    )
    margin: float = setting(
        0.0, minimum=0, help="the candidate must be better than the promoted model by more than this."
    )
    timeout_seconds: float = setting(
        300.0, minimum=1, maximum=86400, help="how long the measuring may go without a batch before it counts as hung."
    )
    registered_model: str = setting(
        "",
        help="name in the model registry of MLflow, on the server that MLFLOW_TRACKING_URI names, under which the "
        "alias champion is to point to what is promoted; empty is none.",
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if set(self.registered_model) & set("/:'\""):  # MLflow refuses / and :, and its searches refuse ' and "
            raise InputError(
                f"PromotionOptions.registered_model must have no /, :, ' or \", got {self.registered_model!r}: choose "
                "another name"
            )


@dataclass(frozen=True)
class Verdict:
    """A decision about a candidate: the measure, both scores, and whether the candidate is better.

    Attributes:
        current: the promoted model's score; None if there is no such model.
    """

    measure: str
    higher: bool
    margin: float
    candidate: float
    current: float | None

    @property
    def is_better(self) -> bool:
        if self.current is None or not math.isfinite(self.current):
            return True
        gain = self.candidate - self.current
        gain = gain if self.higher else -gain
        # 0.991 - 0.99 is a little more than 0.001, which is a matter of rounding
        return gain > self.margin and not math.isclose(gain, self.margin)


def judge(candidate: Measured, current: Measured | None, options: PromotionOptions) -> Verdict:
    """Decide whether the candidate is better than the promoted model, and return the verdict with both scores.

    The candidate wins if its measure is better by more than the margin. It also wins if there is no promoted model, or
    if the promoted model's measure or loss is not finite. The candidate's own loss must be finite even if another
    measure decides.

    Args:
        candidate: the candidate's measures on the test split.
        current: the promoted model's measures, by the same recipe; None if there is no promoted model.
        options: the margin; the measure that decides, "" for the recipe's main measure; and whether a higher or a
            lower value is better, "auto" to ask the recipe.

    Raises:
        InputError: the measure is unknown, nothing says whether higher or lower is better, or the candidate's measure
            or loss is not finite.
    """
    name = options.measure or candidate.headline
    if name not in candidate.measures:
        raise InputError(f"measure must be one of {', '.join(candidate.measures)}, got {name!r}")
    if options.better == "auto" and name not in candidate.is_lower_better:
        raise InputError(
            f'better must be "higher" or "lower" for the measure {name}, got "auto": set it, or add {name} to the '
            "recipe's higher_is_better or lower_is_better"
        )
    higher = options.better == "higher" or (options.better == "auto" and not candidate.is_lower_better[name])
    for one in dict.fromkeys(("loss", name)):  # a model whose outputs are NaN still has an accuracy
        if not math.isfinite(value := candidate.measures.get(one, 0.0)):
            raise InputError(f"the candidate's {one} must be finite, got {value}: use a model that has not diverged")
    before = current.measures[name] if current else None
    if current and not math.isfinite(current.measures.get("loss", 0.0)):
        before = math.nan
    return Verdict(name, higher, options.margin, candidate.measures[name], before)
