"""Recipes whose networks cannot be exported, or not as they are, and one whose samples are too few to tell."""

from typing import NamedTuple

import torch
from torch import Tensor, nn

from flyte_ddp.errors import DataError
from flyte_ddp.recipes.classifier import Classifier


class Lines(Classifier):
    """Which side of a line a point is on."""

    samples = "points"

    def data(self, split):
        points = torch.rand(60, 2, generator=torch.Generator().manual_seed(len(split)))
        return points, (points.sum(1) > 1).long()

    def model(self) -> nn.Module:
        return nn.Sequential(nn.Linear(2, 8), nn.ReLU(), nn.Linear(8, 2))

    def facts(self):
        return {"classes": ["below", "above"]}


class Unscored(Lines):
    """Its own measure() has no accuracy."""

    headline = "loss"

    def measure(self, outputs, batch):
        return {"loss": super().measure(outputs, batch)["loss"]}


class Weighted(Lines):
    """Its accuracy has weights."""

    def measure(self, outputs, batch):
        measures = super().measure(outputs, batch)
        return {**measures, "accuracy": (measures["accuracy"], batch[0][:, 0])}


class OneHot(Lines):
    """Its labels are (n, classes)."""

    def data(self, split):
        points, labels = super().data(split)
        return points, nn.functional.one_hot(labels)

    def measure(self, outputs, batch):
        return super().measure(outputs, (batch[0], batch[1].argmax(1)))


class Words(Lines):
    """Whether a text, padded in memory, begins with a high word; its first texts are equally long."""

    def data(self, split):
        words = torch.randint(1, 20, (60, 7), generator=torch.Generator().manual_seed(len(split)))
        words = words * (torch.arange(7) < torch.tensor(self.lengths(split))[:, None])
        return words, (words[:, 0] > 10).long()

    def lengths(self, split):
        return [3, 3, 3, *range(1, 8), *[4] * 50]

    def model(self) -> nn.Module:
        return Reader()


class Lost(Lines):
    """Most of its samples cannot be read any more."""

    def data(self, split):
        return self

    def __len__(self):
        return 60

    def __getitem__(self, index):
        if index > 10:
            raise DataError(f"sample {index} is gone")
        return torch.zeros(2), torch.tensor(0)


class Reader(nn.Embedding):
    def __init__(self) -> None:
        super().__init__(20, 2)

    def forward(self, words: Tensor) -> Tensor:
        return super().forward(words).cumsum(1).mean(1)


class Lying(Lines):
    """Its network computes something else while it is exported."""

    def model(self) -> nn.Module:
        return Liar()


class Liar(nn.Linear):
    def __init__(self) -> None:
        super().__init__(2, 2)

    def forward(self, points: Tensor) -> Tensor:
        found = super().forward(points)
        return -found if torch.compiler.is_exporting() else found


class Choosing(Lines):
    """Its network looks at values before it decides what to compute."""

    def model(self) -> nn.Module:
        return Chooser()


class Chooser(nn.Linear):
    def __init__(self) -> None:
        super().__init__(2, 2)

    def forward(self, points: Tensor) -> Tensor:
        found = super().forward(points)
        return found if found.sum() > 0 else found * 2


class Nested(Lines):
    """Its network takes *args, and a number and a tensor by name; it returns a dict with a tuple and None in it."""

    def model(self) -> nn.Module:
        return Nest()

    def forward(self, model, batch):
        return model(batch[0], batch[0][:, 1:], scale=2.0, shift=batch[0][:, :1])["scores"][1]


class Nest(nn.Linear):
    def __init__(self) -> None:
        super().__init__(2, 2)

    def forward(self, points, *more, scale, shift):  # type: ignore[override]
        found = super().forward(points) * scale + shift + sum(more)
        return {"scores": (found.sum(1), found), "states": None, "points": points + 0}


class Named(Lines):
    """Its network returns a tuple with names, which torch.export does not write."""

    def model(self) -> nn.Module:
        return Namer()

    def forward(self, model, batch):
        return model(batch[0]).scores


class Scores(NamedTuple):
    total: Tensor
    scores: Tensor


class Namer(nn.Linear):
    def __init__(self) -> None:
        super().__init__(2, 2)

    def forward(self, points: Tensor) -> Scores:  # type: ignore[override]
        found = super().forward(points)
        return Scores(found.sum(1), found)


class Tied(Lines):
    """Two of its layers have the same weights."""

    def model(self) -> nn.Module:
        first, last = nn.Linear(2, 2, bias=False), nn.Linear(2, 2)
        last.weight = first.weight
        return nn.Sequential(first, nn.Tanh(), last)
