"""Seeds of the steps of a training under Lightning, by which a resumed training draws as an undisturbed one."""

from typing import Any

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import Checkpoint

from flyte_ddp.engine.seeds import seed_all
from flyte_ddp.lightning.lightning_compat import before_each_epoch, before_each_step, before_each_validation
from flyte_ddp.lightning.observer import RankObserver
from flyte_ddp.random_numbers import Use, derive_key


class StepSeeds(Checkpoint):
    """A callback that seeds all generators at each step. Lightning calls a Checkpoint after other callbacks.

    In a step the ranks draw different numbers. What is drawn outside of steps, such as an order or a split, has to be
    the same on all ranks, or they would not share the samples among them.
    """

    def __init__(self, seed: int, rank: int, observer: RankObserver):
        """Seed nothing yet.

        Args:
            seed: the setting seed.
            rank: this rank.
            observer: has the epoch that training begins with, or goes on with.
        """
        self._settings_seed, self._rank, self._observer = seed, rank, observer

    def begin_order(self) -> None:
        """Seed all generators as at the start of the first epoch that is trained, for the order of its samples."""
        self._seed(self._observer.position[0], 0)

    def on_train_start(self, trainer: Trainer, module: LightningModule) -> None:
        before_each_epoch(trainer, lambda: self._seed(trainer.current_epoch, 0))
        before_each_step(trainer, lambda: self._seed(trainer.current_epoch, trainer.fit_loop.epoch_loop.batch_idx + 1))
        before_each_validation(trainer, lambda: self._seed_evaluation(trainer))

    def on_train_epoch_start(self, trainer: Trainer, module: LightningModule) -> None:
        self._seed(trainer.current_epoch, 0)

    def on_train_batch_start(self, trainer: Trainer, module: LightningModule, batch: Any, batch_idx: int) -> None:
        self._seed(trainer.current_epoch, batch_idx + 1, 1 + self._rank)

    def on_train_batch_end(
        self, trainer: Trainer, module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        self._seed(trainer.current_epoch, batch_idx + 1, 0)

    def on_validation_batch_start(
        self, trainer: Trainer, *step: Any
    ) -> None:  # module, batch, number, and the loader's
        batch_idx, *loader = step[2:]
        self._seed_evaluation(trainer, 1 + self._rank, 1 + batch_idx, *loader)

    def on_validation_batch_end(self, trainer: Trainer, *_: Any) -> None:
        self._seed_evaluation(trainer)

    def on_test_batch_start(self, trainer: Trainer, *step: Any) -> None:
        self.on_validation_batch_start(trainer, *step)

    def on_test_batch_end(self, trainer: Trainer, *_: Any) -> None:
        self._seed_evaluation(trainer)

    def _seed_evaluation(self, trainer: Trainer, *step: int) -> None:
        self._seed(trainer.current_epoch, int(trainer.num_training_batches), *step)

    def _seed(self, *position: int) -> None:
        """Seed all generators by a position: the epoch and step, then within a step 1 + the rank, or at its end 0."""
        seed_all(derive_key(Use.LIGHTNING, self._settings_seed, *position))
