"""Remedies for errors of Lightning and torch that name what only a script of one's own can do."""

import math
from collections.abc import Sequence
from typing import Any

from lightning.pytorch import Trainer

from flyte_ddp.errors import InputError

REMEDIES = {
    "ddp_find_unused_parameters_true": 'as an option: --options \'{"strategy": "ddp_find_unused_parameters_true"}\'',
    "Trainer(use_distributed_sampler=False)": (
        "derive the batch sampler from torch.utils.data.BatchSampler, with sampler, batch_size and drop_last as "
        "parameters of its __init__, which Lightning calls again on several ranks; or share the samples out in an "
        "IterableDataset that makes the batches itself"
    ),
}


def with_remedy(error: Exception) -> InputError | None:
    """Return an InputError with the error's text and what to do about it; None if REMEDIES has nothing for it."""
    remedies = [remedy for text, remedy in REMEDIES.items() if text in str(error)]
    return InputError(f"{type(error).__name__}: {str(error).strip()} Here: {remedies[0]}") if remedies else None


def describe_rank_change(ran_on: Sequence[dict[str, Any]], ranks: int) -> str:
    """Return a warning if a training continues on another number of ranks than before, else an empty text.

    Args:
        ran_on: the machines that the training has run on before, latest last, each with its number of "ranks"; or [].
        ranks: the number of ranks now.
    """
    before = ran_on[-1]["ranks"] if ran_on else ranks
    if ranks == before:
        return ""
    return (
        f"training goes on on {_counted(ranks)} from a checkpoint of {_counted(before)}: under Lightning the "
        "result depends on their number, as do the steps of an epoch, and with them schedules: resume on "
        f"{_counted(before)}, or train anew with --options '{{\"resume\": false}}'"
    )


def check_schedules(trainer: Trainer, step: int, other_ranks: str) -> None:
    """Raise InputError if a learning rate schedule would end before the training does.

    Only schedules with total_steps, such as OneCycleLR, can be too short. That happens when a training continues on
    fewer ranks than before, because an epoch then has more steps.

    Args:
        trainer: the trainer, at the start of this attempt, with the schedules restored.
        step: how many batches of the current epoch are done.
        other_ranks: the text from describe_rank_change(), the end of the message. If empty, the number of ranks is
            the same as before, and nothing is checked.
    """
    epochs = range(trainer.current_epoch, trainer.max_epochs or 0)
    for config in trainer.lr_scheduler_configs if other_ranks else ():
        schedule = config.scheduler
        total = getattr(schedule, "total_steps", None)
        if total is None:
            continue
        # As Lightning counts: every frequency-th batch, from each epoch's beginning on, if an optimizer steps after it
        if config.interval == "step":
            of_epoch = _count_steps(trainer, config.frequency, 0)
            left = _count_steps(trainer, config.frequency, step) + of_epoch * (len(epochs) - 1)
        else:
            left = sum((epoch + 1) % config.frequency == 0 for epoch in epochs)
        done = schedule.last_epoch
        if done + left > total:
            raise InputError(
                f"{type(schedule).__name__}.total_steps is {total}, of which {done} are done, and {left} are to come: "
                f"{other_ranks}"
            )


def _count_steps(trainer: Trainer, frequency: int, first: int) -> int:
    """Return after how many of an epoch's batches, from the batch `first` on, a schedule takes a step."""
    batches, accumulated = trainer.num_training_batches, trainer.accumulate_grad_batches
    if math.isinf(batches):  # nobody knows
        return 0
    numbers = range(frequency, int(batches) + 1, frequency)
    return sum(number > first and (number % accumulated == 0 or number == batches) for number in numbers)


def _counted(ranks: int) -> str:
    return f"{ranks} rank{'s' * (ranks > 1)}"
