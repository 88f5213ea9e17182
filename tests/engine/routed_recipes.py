"""Layers that no sample of a rank may reach, and networks that do with none."""

import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.utils.rnn import pack_padded_sequence

from tests.engine.coupled_recipes import Everyone
from tests.engine.probe_recipes import WIDTH, Sound, table


class Routed(nn.Module):
    """Experts, each for some of the samples; the last of them for a single one of the whole table."""

    def __init__(self):
        super().__init__()
        self.experts = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))

    def forward(self, rows):
        lone = (rows[:, 0] == table()[6, 0]).long()
        routes, outputs = torch.where(lone == 1, 2, (rows[:, 1] > 0).long()), torch.zeros_like(rows)
        for number, expert in enumerate(self.experts):
            if (routes == number).any():
                outputs[routes == number] = expert(rows[routes == number])
        return outputs


class Experts(Sound):
    def model(self):
        return Routed()


class NeverEmpty(nn.Module):
    """Layers that fail without samples."""

    def __init__(self):
        super().__init__()
        self.experts = Routed()
        self.gru = nn.GRU(1, WIDTH, batch_first=True)

    def forward(self, rows):
        features = F.instance_norm(self.experts(rows).unflatten(1, (2, -1))).flatten(1)
        packed = pack_padded_sequence(features[:, :, None], torch.full((len(rows),), WIDTH), batch_first=True)
        return self.gru(packed)[1][0]


class Borrowing(Everyone):
    def model(self):
        return NeverEmpty()

    def optimizer(self, model):
        return torch.optim.SGD(model.parameters(), 0.1, momentum=0.5, weight_decay=0.1)

    def augment(self, batch, random):
        return batch + 0.1 * random.normal(WIDTH) * (torch.arange(WIDTH) > 0)

    def predictions(self, outputs, batch):
        return outputs


class BorrowingAlone(Borrowing):
    """Compares no samples, and draws and normalises by rank."""

    def model(self):
        return nn.Sequential(NeverEmpty(), nn.BatchNorm1d(WIDTH), nn.Dropout(0.2))

    def measure(self, outputs, batch):
        return Sound.measure(self, outputs, batch)
