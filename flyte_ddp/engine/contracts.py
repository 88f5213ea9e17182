"""The plan of a training, and what it, its Progress and the writer of its checkpoints must have for one another."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch

from flyte_ddp.engine.sums import Sums
from flyte_ddp.errors import NonFiniteError


@dataclass(frozen=True)
class StepFigures:
    """The figures of a step besides its measures; norms of gradients are Euclidean, before clipping.

    Attributes:
        learning_rate: of the first parameter group.
        gradient_norm: of all parameters together.
        gradient_norms: by parameter.
        skipped_updates: how many updates were left out so far, see TrainingSettings.skip_spikes.
    """

    learning_rate: float
    gradient_norm: float = 0.0
    gradient_norms: Mapping[str, float] = field(default_factory=dict)
    skipped_updates: int = 0


class Resumable(Protocol):
    """A training that a checkpoint is written of."""

    device: torch.device
    progress: Any  # a Progress, whose module imports this one

    def state_dict(self) -> dict[str, Any]:
        """Return all that a resume at this epoch and step needs."""
        ...


class Training(Resumable, Protocol):
    """A training as its Progress sees it: that of a recipe, of a loop of a user's own, or of a LightningModule."""

    def measures(self, pairs: Sequence[float]) -> dict[str, float]:
        """Return the measures that are logged for these values and weights, which alternate."""
        ...

    def samples(self, sums: Sums) -> int:
        """Return how many samples the epoch's steps up to these sums have had."""
        ...

    def figures(self) -> StepFigures:
        """Return the last step's figures besides its measures; the host waits for the device."""
        ...

    def step_error(self, step: int) -> NonFiniteError:
        """Return the error of a step, from 0, whose numbers were not finite; a collective."""
        ...

    def go_back(self, step: int) -> bool:
        """Restore the training as it was before a step, from 0, that only has to be taken again; else return False."""
        return False

    def must_wait(self) -> bool:
        """Return whether a checkpoint has to wait for a later step, as it has no room for gradients; a collective."""
        return False

    def compare_between_ranks(self) -> None:
        """Name ranks whose weights differ from those of the others; a collective."""
        ...


class Checkpoints(Protocol):
    """A writer of checkpoints, or of this rank's part of them."""

    def due(self) -> bool: ...

    def save(self, training: Resumable, is_last: bool = False) -> None: ...

    def close(self) -> None: ...


@dataclass(frozen=True)
class Plan:
    """The plan of a training, as its start tells it.

    Attributes:
        headline: the name of its main measure.
        percent: the names of measures from 0 to 1 that are shown in per cent.
        lower_is_better: the names of measures besides the loss of which the recipe says so.
        precision: the type that networks compute in.
        epochs: how many there are in all.
        steps_per_epoch, samples_per_epoch: of the training.
        train_samples, validation_samples, test_samples: sizes of the splits; 0 without one.
        samples: what the samples are called, in the plural.
        may_end_early: whether training may end before its last epoch.
        sample_flops: see TrainingResult.
        remarks: what is said at the start.
        slow_data: what to do about a rank that is slow in its data.
        meets_within: whether ranks wait for each other within a step, see Stragglers.
        count_tokens: returns the tokens of an epoch's steps, given the epoch, the first step and the one after the
            last; None where they are known from no lengths. A measure `tokens` comes first.
    """

    headline: str
    percent: tuple[str, ...]
    precision: str
    epochs: int
    steps_per_epoch: int
    samples_per_epoch: int
    train_samples: int
    validation_samples: int = 0
    test_samples: int = 0
    lower_is_better: Sequence[str] = ()
    samples: str = "samples"
    may_end_early: bool = False
    sample_flops: float = 0.0
    remarks: Sequence[str] = ()
    slow_data: str = ""
    meets_within: bool = False
    count_tokens: Callable[[int, int, int], int] | None = None
