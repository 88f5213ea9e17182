"""The order of the sentences of examples/finetune_text, for all its trainers."""

from collections.abc import Iterator

import torch
from finetune_text.recipe import FinetuneText
from finetune_text.settings import Settings
from torch.utils.data import DistributedSampler

from flyte_ddp.engine.batches.batches import Shuffled
from flyte_ddp.engine.batches.lengths import SimilarLengths
from flyte_ddp.engine.batches.loading import Streamed
from flyte_ddp.random_numbers import Use, derive_key
from flyte_ddp.recipe import CPU


class SameOrder(DistributedSampler):
    """The training sentences in the order in which our engine sees them: all, or a rank's part of each batch."""

    def __init__(self, settings: Settings, rank: int = 0, ranks: int = 1):
        recipe = FinetuneText(settings)
        self.settings, self.lengths = settings, torch.tensor(recipe.lengths("train"))
        self.sentences = Streamed(recipe.data("train"), CPU)
        super().__init__(self.sentences.dataset, ranks, rank)

    def __iter__(self) -> Iterator[int]:
        count, size, key = len(self.lengths), self.settings.batch_size, (self.settings.seed, self.epoch)
        shuffled = Shuffled(self.sentences, [derive_key(Use.PASS, *key, 0)])
        lengths = derive_key(Use.LENGTHS, *key)
        order = SimilarLengths(shuffled, self.lengths, count, size, FinetuneText.length_window, lengths)
        for batch in order.at(torch.arange(count)).split(size):
            yield from batch.tensor_split(self.num_replicas)[self.rank].tolist()
