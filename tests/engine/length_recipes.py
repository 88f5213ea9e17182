"""Recipes whose samples have different lengths."""

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import Dataset

from flyte_ddp.recipe import Recipe

LENGTHS = [1 + 7 * number % 11 for number in range(30)]
WIDTH, WORDS = 8, 20


class Sentences(Dataset):
    """Words, a mask, and features of a fixed size, which is also the length of some."""

    def __init__(self, extra=0):
        self.extra = extra

    def __len__(self):
        return len(LENGTHS)

    def __getitem__(self, index):
        words = 1 + torch.arange(LENGTHS[index] + self.extra) * (index + 3) % (WORDS - 1)
        return words, torch.ones(len(words)), torch.full((5, 2), index / 30)


class Reader(nn.Module):
    def __init__(self):
        super().__init__()
        self.words, self.more, self.last = nn.Embedding(WORDS, WIDTH), nn.Linear(10, WIDTH), nn.Linear(WIDTH, WORDS)

    def forward(self, words, mask, features):
        read = F.dropout(self.words(words), 0.5, self.training) + self.more(features.flatten(1))[:, None]
        return self.last(F.dropout(torch.tanh(read.cumsum(1)), 0.3, self.training))


class Varied(Recipe):
    samples, length_window, lower_is_better = "sentences", 2, ("padding",)

    def data(self, split):
        return Sentences()

    def lengths(self, split):
        return LENGTHS

    def model(self):
        return Reader()

    def forward(self, model, batch):
        return model(*batch)

    def measure(self, outputs, batch):
        words, mask, _ = batch
        assert words.shape == mask.shape == outputs.shape[:2]
        loss = F.cross_entropy(outputs[:, :-1].transpose(1, 2), words[:, 1:], reduction="none")
        counted = mask[:, 1:]
        return {"loss": ((loss * counted).sum(1), counted.sum(1)), "padding": (1 - mask.mean(1))}


class Counted(Varied):
    """Counts tokens itself, without lengths."""

    length_window = 0

    def data(self, split):
        samples = Sentences()
        columns = zip(*(samples[index] for index in range(len(LENGTHS))), strict=True)
        return tuple(nn.utils.rnn.pad_sequence([*column], batch_first=True) for column in columns)

    def lengths(self, split):
        return None

    def measure(self, outputs, batch):
        return {**super().measure(outputs, batch), "tokens": batch[1].sum(1)}


class HeldOut(Varied):
    """In memory, with more padding than there needs to be in a batch."""

    length_window = 0

    def data(self, split):
        found = [Sentences()[index] for index in range(len(LENGTHS))]
        padded = [nn.utils.rnn.pad_sequence([row[part] for row in found], batch_first=True) for part in (0, 1)]
        return *padded, torch.stack([row[2] for row in found])


class Unsorted(Varied):
    length_window = 0


class Sorted(Varied):
    length_window = 6


class WithoutLengths(Varied):
    length_window = 0

    def lengths(self, split):
        return None


class WindowAlone(Unsorted):
    length_window = 3

    def lengths(self, split):
        return None


class TooFew(Varied):
    def lengths(self, split):
        return LENGTHS[1:]


class Wrong(Varied):
    def data(self, split):
        return Sentences(extra=1)


class Ragged(Varied):
    def lengths(self, split):
        return [[length] * (1 + length % 2) for length in LENGTHS]


class WrongInTheMiddle(Varied):
    more = 1

    def lengths(self, split):
        return [*LENGTHS[:4], LENGTHS[4] + self.more, *LENGTHS[5:]]


class TooShortInTheMiddle(WrongInTheMiddle):
    more = -1
