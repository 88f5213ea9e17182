"""Recipes whose data NumPy holds in ways that torch has not, or whose samples lack something."""

import tempfile
from collections import UserDict

import numpy as np
import torch

from tests.engine.dataset_recipes import OfDataset, Rows
from tests.engine.probe_recipes import SIZE, Sound, table


class BytesSwapped(Sound):
    """What NumPy holds in ways that torch has not."""

    def data(self, split):
        return self.held(table())

    def held(self, rows):
        return rows.astype(">f4")


class Reversed(BytesSwapped):
    def held(self, rows):
        return rows[::-1, ::-1]


class OfEightyBits(BytesSwapped):
    def held(self, rows):
        return rows.astype(np.longdouble)

    def forward(self, model, batch):
        return model(batch.float())


class OfAField(BytesSwapped):
    def held(self, rows):
        records = np.zeros(rows.shape, [("flag", np.int8), ("value", np.float32)])
        records["value"] = rows
        return records["value"]


class OnDisk(BytesSwapped):
    def held(self, rows):
        with tempfile.NamedTemporaryFile() as file:
            rows.astype(">f4").tofile(file.name)
            return np.memmap(file.name, ">f4", "r", shape=rows.shape)


class OfSixteenBits(BytesSwapped):
    """As features that were computed in bfloat16, which NumPy has not."""

    def held(self, rows):
        return torch.from_numpy(rows).bfloat16()

    def forward(self, model, batch):
        return model(batch.float())


class Computed(BytesSwapped):
    """By a network, and nobody has said that it is not to be trained."""

    def held(self, rows):
        torch.manual_seed(0)
        return torch.nn.Linear(rows.shape[1], rows.shape[1])(torch.from_numpy(rows))


class Sparse(BytesSwapped):
    def held(self, rows):
        return torch.from_numpy(rows).to_sparse()


class Nested(BytesSwapped):
    def held(self, rows):
        return torch.nested.nested_tensor([torch.from_numpy(row[: 1 + len(row) // 2]) for row in rows])


class ListedSamples(BytesSwapped):
    def held(self, rows):
        return [(torch.from_numpy(row), torch.tensor(0)) for row in rows]


class LikeADict(BytesSwapped):
    """As a tokenizer's BatchEncoding: a mapping that is no dict, in another one."""

    def held(self, rows):
        return UserDict(inputs=UserDict(rows=rows), mask=np.ones(len(rows)))

    def forward(self, model, batch):
        return model(batch["inputs"]["rows"])

    def measure(self, outputs, batch):
        return super().measure(outputs, batch["inputs"]["rows"])


class SamplesLikeDicts(LikeADict):
    def data(self, split):
        return RowsLikeDicts()


class LikeADataset(Sound):
    """As one of Hugging Face: with samples and a length, and no Dataset of torch."""

    def data(self, split):
        return RowsOfNoDataset()


class TextOnDisk(BytesSwapped):
    def held(self, rows):
        with tempfile.NamedTemporaryFile() as file:
            rows.astype("S8").tofile(file.name)
            return np.memmap(file.name, "S8", "r", shape=rows.shape)


class ATable(Sound):
    """As pandas' and polars': its items are columns."""

    def data(self, split):
        return DataFrame()


class NamedArrays(Sound):
    def data(self, split):
        return table(), np.array([f"row {index}" for index in range(SIZE)])


class Decoded(dict):
    """What is stored is not what it gives."""

    def __getitem__(self, name):
        return super().__getitem__(name) / 2


class RowsLikeDicts(Rows):
    def __getitem__(self, index):
        return UserDict(inputs=Decoded(rows=2 * table()[index]), mask=np.ones(()))


class RowsOfNoDataset:
    __len__, __getitem__ = Rows.__len__, Rows.__getitem__


class DataFrame(RowsOfNoDataset):
    columns = ("feature",)


class Lacking(Rows):
    """The sample 5 is not there."""

    def __getitem__(self, index):
        return None if index == 5 else super().__getitem__(index)


class LackingLabel(Lacking):
    def __getitem__(self, index):
        return super(Lacking, self).__getitem__(index), None if index == 5 else 1.0


class LackingPart(Lacking):
    def __getitem__(self, index):
        row = super(Lacking, self).__getitem__(index)
        return row if index == 5 else (row, row)


class NamedRows(Rows):
    def __getitem__(self, index):
        return {"row": table()[index], "name": f"row {index}"}


class MissingRows(Rows):
    def __getitem__(self, index):
        raise FileNotFoundError(f"images/{index}.png")


class LackingSamples(OfDataset):
    dataset = Lacking


class LackingLabels(OfDataset):
    dataset = LackingLabel


class LackingParts(OfDataset):
    dataset = LackingPart


class NamedSamples(OfDataset):
    dataset = NamedRows


class MissingSamples(OfDataset):
    dataset = MissingRows
