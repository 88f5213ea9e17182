"""The private parts of Lightning that this package uses, as of version 2.6: see tests/lightning/test_ranks.py."""

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
