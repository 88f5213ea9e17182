"""The tracker of the best weights so far, which also decides when to stop early."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from flyte_ddp.model_files.weights import copy_to_host
from flyte_ddp.recipe import Recipe

JUDGED_BY = ("measure", "is_lower_better")
STATE = (*JUDGED_BY, "best", "score", "improved", "waited", "weights")


def is_lower_better(recipe: Recipe, measure: str) -> bool | None:
    """Return whether lower values of a measure are better; None if the recipe says neither that nor the opposite."""
    if measure == "loss" or measure in recipe.lower_is_better:
        return True
    return False if measure in (*recipe.percent, *recipe.higher_is_better) else None


@dataclass
class BestTracker:
    """The best evaluation so far, of one or several per epoch.

    It is the same on all ranks, since they share the measures.

    Attributes:
        measure: the measure to compare by; the earliest of equals is the best.
        is_lower_better: whether lower values of the measure are better.
        patience: training ends after this many evaluations without an improvement; 0 is never.
        minimum_delta: an improvement must beat the last one by more than this.
        best: the number of the best evaluation, from 0; -1 if the measure has never been finite.
        score: the measure of the best evaluation, negated if lower is better.
        improved: the score at the last improvement.
        waited: evaluations since the last improvement.
        weights: the weights of the best evaluation, on the CPU; never changed in place.
    """

    measure: str
    is_lower_better: bool
    patience: int = 0
    minimum_delta: float = 0.0
    best: int = -1
    score: float = -math.inf
    improved: float = -math.inf
    waited: int = 0
    weights: dict[str, Tensor] | None = None

    @property
    def is_over(self) -> bool:
        """Return whether training is to end, because `patience` evaluations have passed without an improvement."""
        return 0 < self.patience <= self.waited

    def after_evaluation(self, number: int, measures: Mapping[str, float], weights: Mapping[str, Tensor]) -> None:
        """Copy the weights to the host if this evaluation is the best so far, and update the count for patience.

        Any better value makes an evaluation the best. The count for patience, `waited`, grows by 1. The first finite
        value sets the count to 0, and so does a value that beats, by more than minimum_delta, the last one that did. An
        evaluation whose measure is missing or not finite is never the best.

        Args:
            number: the number of the evaluation, from 0.
            measures: the measures of the validation split, by name.
            weights: the weights that were evaluated, by name; of a sharded network, this rank's rows.
        """
        value = measures.get(self.measure, math.nan)
        signed = -value if self.is_lower_better else value
        score = signed if math.isfinite(value) else -math.inf
        if score > self.score:
            self.best = number
            self.score = score
            self.weights = copy_to_host(weights)
        self.waited += 1
        if score > self.improved + self.minimum_delta:
            self.improved = score
            self.waited = 0

    def state_dict(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in STATE}

    def load_state_dict(self, saved: Mapping[str, Any]) -> None:
        """Restore an earlier state. Do nothing if it has another measure, or the other direction."""
        if all(saved[name] == getattr(self, name) for name in JUDGED_BY):
            vars(self).update({name: saved[name] for name in STATE})
