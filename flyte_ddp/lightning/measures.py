"""The measures of a LightningModule: whatever it logs, under a name that is the same for all splits."""

from collections.abc import Mapping
from typing import Any

from lightning.pytorch import Trainer
from lightning.pytorch.loggers.logger import DummyLogger

from flyte_ddp.lightning.job import without_split

FORKS = ("_step", "_epoch")  # what Lightning appends to the name of what is logged both by step and by epoch


def read_measures(logged: Mapping[str, Any]) -> dict[str, float]:
    """Return the logged numbers by names without the split: "val_loss" and "val/loss" become "loss".

    A name keeps its prefix if the short name is logged, too. If Lightning logs a number by step and by epoch, as NAME,
    NAME_step and NAME_epoch, only NAME is returned.

    Args:
        logged: what a module has logged, by name. Tensors of several numbers are left out.
    """
    values = {name: float(value) for name, value in logged.items() if getattr(value, "numel", lambda: 1)() == 1}
    measures = {}
    for name, value in values.items():
        if not any(name.endswith(fork) and name.removesuffix(fork) in values for fork in FORKS):
            short = without_split(name)
            measures[name if short in values else short] = value
    return measures


class LoggedByValidation(DummyLogger):
    """A logger of Lightning that keeps what the validation logs: Trainer.callback_metrics has it mixed with the rest.

    Whatever else a module does with `self.logger` has no effect: trackers belong to the parent of the ranks.

    Attributes:
        values: what the latest validation has logged, by name.
        trainer: the trainer that this is the logger of; set it before training.
    """

    def __init__(self) -> None:
        super().__init__()
        self.values: dict[str, float] = {}
        self._names: set[str] = set()
        self.trainer: Trainer

    def log_metrics(self, metrics: Mapping[str, float], step: int | None = None) -> None:
        if self.trainer.validating:
            self.values = {name: value for name, value in metrics.items() if name != "epoch"}
            self._names |= {*self.values, *(name.removesuffix("_epoch") for name in self.values)}

    def trained(self) -> dict[str, float]:
        """Return the measures that training steps have logged last, as read_measures() does."""
        return read_measures(self.without_its_own(self.trainer.callback_metrics))

    def without_its_own(self, logged: Mapping[str, Any]) -> dict[str, Any]:
        """Return what was logged without what validations have logged, by name."""
        return {name: value for name, value in logged.items() if name not in self._names}


def find_unlogged_measures(
    headline: str, trained: set[str], validated: Mapping[str, float], has_validation: bool, has_batches: bool
) -> list[str]:
    """Return a warning for each measure that a report needs, and the module does not log; [] if all is well.

    - The headline gets a warning if neither training nor validation logs it.
    - After a validation, "loss" and the headline each get a warning if they are logged, but not for the whole
    validation: only in training, or for single loaders, as NAME/dataloader_idx_N.
    - If no validation loader has a batch, the only warning says so.

    Args:
        headline: the name of the main measure.
        trained: names that training steps have logged.
        validated: what the validation has logged, by name.
        has_validation: whether a validation has run.
        has_batches: False if there are validation loaders without any batch.
    """
    if not has_batches:
        return ["nothing is validated, as val_dataloader has no batch: give it samples, or leave it out"]
    problems = []
    logged = {*trained, *validated}
    of_loaders = {name.partition("/dataloader_idx_")[0] for name in validated if "/dataloader_idx_" in name}
    if headline not in logged | of_loaders:
        known = ", ".join(sorted(logged)) + " (nothing is validated)" * (not has_validation)
        problems.append(f"headline must be a measure that the module logs: {known}, got {headline!r}: change it")
    for name in sorted(({"loss", headline} & (logged | of_loaders)) - {*validated}) if has_validation else ():
        got = ", ".join(sorted(validated)) or "nothing"
        remedy = f"log val_{name} in validation_step"
        if of_loaders:
            remedy += ", for one of the loaders, with add_dataloader_idx=False"
        problems.append(f"{name} is not shown for the validation, which logs {got}: {remedy}")
    return problems
