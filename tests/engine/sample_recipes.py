"""Recipes whose data NumPy holds in ways that torch has not, or whose samples lack something."""

import tempfile

import numpy as np

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


class TextOnDisk(BytesSwapped):
    def held(self, rows):
        with tempfile.NamedTemporaryFile() as file:
            rows.astype("S8").tofile(file.name)
            return np.memmap(file.name, "S8", "r", shape=rows.shape)


class NamedArrays(Sound):
    def data(self, split):
        return table(), np.array([f"row {index}" for index in range(SIZE)])


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
