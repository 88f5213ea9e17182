"""The private parts of Lightning that this package uses, as of version 2.6: see tests/lightning/test_ranks.py."""

from typing import Any

from lightning.pytorch import Trainer
from lightning.pytorch.strategies import DDPStrategy, Strategy
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from flyte_ddp.engine.torch_compat import last_layers_first, settle_buckets


def settle_buckets_of(strategy: Strategy) -> None:
    """Has it replicate the network as SettledBuckets does, so that a resumed training ends with the same bits."""
    if not isinstance(strategy, DDPStrategy):
        return
    replicate = strategy._setup_model

    def replicated(model: nn.Module) -> DistributedDataParallel:
        with last_layers_first(model):
            wrapped = replicate(model)
        settle_buckets(wrapped)
        return wrapped

    strategy._setup_model = replicated  # type: ignore[method-assign]


def checkpoint_now(trainer: Trainer) -> dict[str, Any]:
    """What trainer.save_checkpoint would write, which has no form without a file; a collective, if one of the module's
    hooks is."""
    checkpoint: dict[str, Any] = trainer._checkpoint_connector.dump_checkpoint(weights_only=False)
    return checkpoint
