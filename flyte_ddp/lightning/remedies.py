"""What to do here about errors of Lightning's, or torch's, that say what can only be done in a script of one's own."""

from collections.abc import Sequence
from typing import Any

from flyte_ddp.errors import InputError

SCHEDULE = "Tried to step"  # torch's OneCycleLR, past its last step
REMEDIES = {
    "ddp_find_unused_parameters_true": 'as an option: --options \'{"strategy": "ddp_find_unused_parameters_true"}\'',
    "Trainer(use_distributed_sampler=False)": (
        "derive the batch sampler from torch.utils.data.BatchSampler, with sampler, batch_size and drop_last as "
        "parameters of its __init__, which Lightning calls again on several ranks; or share the samples out in an "
        "IterableDataset that makes the batches itself"
    ),
}


def with_remedy(error: Exception, other_ranks: str) -> InputError | None:
    """The error with what to do about it; None for most. other_ranks: see observer.py."""
    known = {**REMEDIES, SCHEDULE: other_ranks}
    remedies = [remedy for text, remedy in known.items() if remedy and text in str(error)]
    return InputError(f"{type(error).__name__}: {str(error).strip()} Here: {remedies[0]}") if remedies else None


def problem_of_ranks(ran_on: Sequence[dict[str, Any]], now: dict[str, Any]) -> str:
    """Of a resume on another number of ranks than that of the checkpoint; empty without one. See hosts/machine.py."""
    ranks, before = (one["ranks"] for one in (now, (ran_on or [now])[-1]))
    if ranks == before:
        return ""
    return (
        f"training goes on on {_counted(ranks)} from a checkpoint of {_counted(before)}: under Lightning the "
        "result depends on their number, as do the steps of an epoch, and with them schedules: resume on "
        f"{_counted(before)}, or train anew with --options '{{\"resume\": false}}'"
    )


def _counted(ranks: int) -> str:
    return f"{ranks} rank{'s' * (ranks > 1)}"
