"""While a block runs, whatever torch draws or normalises is that of the global batch, whoever wrote the code."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from flyte_ddp.engine.global_batch.operators import replaced_by
from flyte_ddp.engine.global_batch.positions import Positions
from flyte_ddp.engine.torch_compat import any_batch_size


class GlobalBatchMode(Positions):
    """The positions of a rank's samples, which torch's operators ask for while a block runs."""

    @contextmanager
    def block(self, seed: int) -> Iterator[None]:
        """Of a step's forward and backward pass; its seed is the same on all ranks."""
        self.drawn, self.digest = [], 0
        torch.default_generator.manual_seed(seed)
        with replaced_by(self), any_batch_size():
            yield
