"""While a block runs, whatever torch draws or normalises is that of the global batch, whoever wrote the code."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from flyte_ddp.engine.global_batch.operators import replaced_by
from flyte_ddp.engine.global_batch.positions import Positions
from flyte_ddp.engine.seeds import seed_part
from flyte_ddp.engine.torch_compat import any_batch_size


class GlobalBatchMode(Positions):
    """The positions of a rank's samples, which torch's operators ask for while a block runs.

    Attributes:
        by_part: with virtual ranks, torch's operators stay as they are and draw from generators seeded for each part.
    """

    by_part = False

    @contextmanager
    def block(self, seed: int, part: int = 0, call: int = 0) -> Iterator[None]:
        """Enclose the forward and backward pass of a part of a batch.

        Args:
            seed: the seed of the step, which is the same on all ranks.
            part, call: see seed_part, if the mode goes by part.
        """
        self.drawn, self.digest = [], 0
        if self.by_part:
            seed_part(seed, part, call)
            with any_batch_size():
                yield
            return
        torch.default_generator.manual_seed(seed)
        with replaced_by(self), any_batch_size():
            yield
