"""The part of a checkpoint within an epoch that Lightning's own state lacks."""

from collections.abc import Mapping
from typing import Any

from lightning.pytorch import LightningModule, Trainer
from torch import Tensor, distributed
from torchmetrics import Metric

from flyte_ddp.engine.own_loop.optimizers import Optimizers, PendingGradients
from flyte_ddp.engine.torch_compat import pytree
from flyte_ddp.lightning.lightning_compat import (
    add_to_logged,
    logged_in_epoch,
    metric_state,
    set_metric_state,
)


class EpochState:
    """Gradients that no optimizer has stepped by, and what each rank has added up of the epoch.

    Attributes:
        gradients: those that a checkpoint may have to wait for.
    """

    def __init__(self, trainer: Trainer, module: LightningModule):
        self._trainer, self._module, self._device = trainer, module, trainer.strategy.root_device
        self._optimizers = Optimizers({str(number): one for number, one in enumerate(trainer.optimizers)})
        for optimizer in trainer.optimizers:
            optimizer.register_step_post_hook(self._optimizers.stepped)
        self.gradients = PendingGradients(self._optimizers, self._device)
        self._logged: dict[str, list[Tensor]] = {}

    def restore(self, saved: Mapping[str, Any]) -> None:
        """Restore what gather has returned in an earlier attempt, after hooks that may set it to zero."""
        self._optimizers.put_back(saved["gradients"])
        if len(saved["ranks"]) != self._trainer.world_size:  # what the epoch's steps have logged begins anew
            return
        own = pytree.tree_map_only(Tensor, lambda one: one.to(self._device), saved["ranks"][self._trainer.global_rank])
        self._logged = own["logged"]
        for name, metric in self._metrics().items():
            set_metric_state(metric, own["metrics"][name])

    def begin_step(self) -> None:
        """Note that the optimizers have not stepped in this step."""
        self._optimizers.begin_step()

    def end_step(self) -> None:
        """Add what the epoch's steps have logged before a resume to what the first steps after it have."""
        add_to_logged(self._trainer, self._logged)

    def keep_logged_now(self) -> None:
        """Leave out of what was logged before a resume what has been logged again."""
        for key in self._logged.keys() & logged_in_epoch(self._trainer).keys():
            del self._logged[key]

    def waits(self, steps: int) -> bool:
        """Return whether a checkpoint has to wait for gradients; a collective.

        Args:
            steps: the number of the epoch's batches that are done.
        """
        if self._module.automatic_optimization:
            return steps % self._trainer.accumulate_grad_batches > 0
        return self.gradients.wait()

    def gather(self) -> dict[str, Any]:
        """Return the state, with a part for each rank; a collective."""
        own = {
            "logged": logged_in_epoch(self._trainer),
            "metrics": {name: metric_state(metric) for name, metric in self._metrics().items()},
        }
        ranks: list[Any] = [None] * self._trainer.world_size
        distributed.all_gather_object(ranks, pytree.tree_map_only(Tensor, lambda one: one.cpu(), own))
        return {"gradients": self.gradients.of_weights, "ranks": ranks}

    def _metrics(self) -> dict[str, Metric]:
        return {name: one for name, one in self._module.named_modules() if isinstance(one, Metric)}
