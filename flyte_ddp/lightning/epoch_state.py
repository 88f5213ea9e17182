"""The part of a checkpoint within an epoch that Lightning's own state lacks."""

from collections.abc import Mapping
from typing import Any

from lightning.pytorch import LightningModule, Trainer
from torch import Tensor
from torchmetrics import Metric

from flyte_ddp.engine.collectives import gather_values
from flyte_ddp.engine.own_loop.optimizers import Optimizers, PendingGradients
from flyte_ddp.engine.torch_compat import pytree
from flyte_ddp.lightning.lightning_compat import (
    forget_how_it_was_logged,
    logged_in_epoch,
    metric_state,
    restore_logged,
    set_metric_state,
    values_for_callbacks,
)
from flyte_ddp.lightning.measures import LoggedByValidation


class EpochState:
    """Gradients that no optimizer has stepped by, and what each rank has logged and measured in the epoch.

    Attributes:
        gradients: the gradients, for which a checkpoint may have to wait.
    """

    def __init__(self, trainer: Trainer, module: LightningModule, validation: LoggedByValidation):
        self._trainer, self._module, self._device = trainer, module, trainer.strategy.root_device
        self._validation = validation
        self._optimizers = Optimizers({str(number): one for number, one in enumerate(trainer.optimizers)})
        for optimizer in trainer.optimizers:
            optimizer.register_step_post_hook(self._optimizers.stepped)
        self.gradients = PendingGradients(self._optimizers, self._device)

    def restore(self, saved: Mapping[str, Any]) -> None:
        """Restore what gather() has returned in an earlier attempt: gradients, logged values and metrics.

        Call it after the hooks that begin an epoch, because they may set metrics and gradients to zero.

        The gradients are always restored. Logged values and metrics depend on the number of ranks:

        - The same number as before: each rank restores its own.
        - Another number, with steps left in the epoch: all begin anew.
        - Another number, with no steps left: each rank takes those of one of the earlier ranks.

        Args:
            saved: what gather() has returned, and "is_trained": whether the epoch has no steps left.
        """
        self._optimizers.put_back(saved["gradients"])
        ranks = saved["ranks"]
        if len(ranks) != self._trainer.world_size and not saved["is_trained"]:
            return
        own = ranks[self._trainer.global_rank % len(ranks)]
        own = pytree.tree_map_only(Tensor, lambda one: one.to(self._device), own)
        for name, metric in self._metrics().items():
            set_metric_state(metric, own["metrics"][name])
        restore_logged(self._trainer, self._module, own["logged"])
        values_for_callbacks(self._trainer).update(own["values"])
        if len(ranks) != self._trainer.world_size:
            forget_how_it_was_logged(self._trainer)

    def begin_step(self) -> None:
        """Begin a training step, in which no optimizer has stepped yet."""
        self._optimizers.begin_step()

    def has_lists(self) -> bool:
        """Return whether a metric keeps lists of what the epoch's steps have measured, which no checkpoint has."""
        states = [value for metric in self._metrics().values() for value in metric.metric_state.values()]
        return any(isinstance(value, list) and value for value in states)

    def waits(self, steps: int) -> bool:
        """Return whether a checkpoint must wait for a later step; a collective.

        With automatic optimization, the checkpoint waits while gradients are being accumulated. With manual
        optimization, it waits while the gradients that no optimizer has applied differ between ranks. This wait ends
        after MOST_WAITED steps, and gradients.has_given_up becomes True. When this method returns False, it has also
        stored the gradients that gather() returns.

        Args:
            steps: the number of the epoch's batches that are done.
        """
        if self._module.automatic_optimization:
            is_last = steps >= self._trainer.num_training_batches  # Lightning's optimizers step then
            return steps % self._trainer.accumulate_grad_batches > 0 and not is_last
        return self.gradients.wait()

    def gather(self) -> dict[str, Any]:
        """Return what a checkpoint within the epoch needs besides Lightning's state; a collective.

        Call it after waits() has returned False.

        Returns:
            A dict with two entries:

            - "gradients": the gradients that no optimizer has applied yet, by the position of their weight. They are
              not copied, and are the same on all ranks. The entry is empty with automatic optimization, and if
              gradients.has_given_up.
            - "ranks": for each rank, on the CPU, the states of its metrics, what its steps have logged, and the values
              that callbacks see.
        """
        own = {
            "metrics": {name: metric_state(metric) for name, metric in self._metrics().items()},
            "logged": logged_in_epoch(self._trainer),
            "values": self._validation.without_its_own(values_for_callbacks(self._trainer)),
        }
        ranks = gather_values(pytree.tree_map_only(Tensor, lambda one: one.cpu(), own))
        return {"gradients": self.gradients.of_weights, "ranks": ranks}

    def _metrics(self) -> dict[str, Metric]:
        return {name: one for name, one in self._module.named_modules() if isinstance(one, Metric)}
