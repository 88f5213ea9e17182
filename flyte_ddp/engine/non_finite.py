"""Who has made a step bad."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import distributed

from flyte_ddp.engine.batches.batches import Batch
from flyte_ddp.engine.state import TrainingState
from flyte_ddp.engine.torch_compat import any_batch_size


def find_non_finite(state: TrainingState, shares: Sequence[Batch]) -> tuple[str, list[int]]:
    """Repeats a bad step to find what is not finite, loss or gradient, and on which ranks; a collective.

    The step itself cannot tell: its gradients are those of all ranks together.
    """
    bad = [False, False]
    for part in (part for share in shares for part in state.parts_of(share)):
        with any_batch_size():
            loss = state.parallel.module(part, (False, False), False)
            gradients = state.parallel.own_gradients(loss)
        norms = [torch.linalg.vector_norm(gradient) for gradient in gradients]
        bad_in_part = [not all(bool(one.isfinite()) for one in ones) for ones in ([loss], norms)]
        bad = [was or now for was, now in zip(bad, bad_in_part, strict=True)]
    of_ranks: list[Any] = [None] * distributed.get_world_size()
    distributed.all_gather_object(of_ranks, bad)
    for what, flags in zip(("loss", "gradient"), zip(*of_ranks, strict=True), strict=True):
        ranks = [rank for rank, flag in enumerate(flags) if flag]
        if ranks:
            return what, ranks
    return "gradient", list(range(len(of_ranks)))  # not finite in sum, or sharded
