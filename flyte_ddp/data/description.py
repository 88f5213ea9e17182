"""The description of a prepared dataset: dataset.json."""

import dataclasses
import hashlib
import json
from collections.abc import Mapping
from typing import Any

FORMAT = 2


@dataclasses.dataclass(frozen=True, kw_only=True)
class DatasetDescription:
    """The content of dataset.json.

    Attributes:
        name: the dataset's name, as in the hyperparameters.
        classes: names, in the order of the labels.
        mean, std: per channel over the training images, for pixels from 0 to 1; std is 1 if all pixels are equal.
        train_samples, test_samples: images per split.
        image_shape: (C, H, W).
        passes_per_epoch: how often an epoch goes over the training images; above 1 only if they are few.
        sha256: the hex digest of each file, by its name.
        format: version of the file format.
    """

    name: str
    classes: tuple[str, ...]
    mean: tuple[float, ...]
    std: tuple[float, ...]
    train_samples: int
    test_samples: int
    image_shape: tuple[int, int, int]
    passes_per_epoch: int = 1
    sha256: Mapping[str, str] = dataclasses.field(default_factory=dict)
    format: int = FORMAT

    @property
    def digest(self) -> str:
        """Return the SHA-256 of the whole content as hex: the same wherever and whenever the dataset was prepared."""
        return compute_digest(dataclasses.asdict(self))

    @property
    def remarks(self) -> Mapping[str, str]:
        """Return further remarks for the report, by label."""
        return {}


@dataclasses.dataclass(frozen=True, kw_only=True)
class FolderDescription(DatasetDescription):
    """The content of dataset.json for a folder of image files, which stay where they are.

    Attributes:
        image_shape: the shape of each decoded image.
        split_by: how the images were divided between training and test.
        unreadable: number of files left out because they cannot be decoded.
        unreadable_named: the first of these files, each with the reason.
        left_out: number of classes left out because they have too few images.
        content_sha256: hash of the name and content of every image.
    """

    split_by: str
    unreadable: int
    unreadable_named: tuple[str, ...]
    left_out: int
    content_sha256: str

    @property
    def remarks(self) -> Mapping[str, str]:
        named = "; ".join(self.unreadable_named) + ("; …" if self.unreadable > len(self.unreadable_named) else "")
        channels, height, width = self.image_shape
        return {
            "Images": f"resized and cut around their centre to {width} x {height} pixels, "
            + ("in colour" if channels == 3 else "in grey"),
            "Split": self.split_by,
            "Files that cannot be read": f"{self.unreadable:,}" + (f": {named}" if named else ""),
            "Classes left out": f"{self.left_out:,}",
        }


def compute_digest(content: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


@dataclasses.dataclass(frozen=True)
class StoredData:
    """Data that stay in a storage, to be read from there.

    Attributes:
        url: the URL of the folder or file, which becomes the recipe's data_path.
        digest: a hash that changes when the data do: of the index of blocks, or of names, sizes and ETags.
        options: options for fsspec, by protocol; they may contain keys.
    """

    url: str
    digest: str
    options: dict[str, dict[str, Any]] = dataclasses.field(default_factory=dict, repr=False)

    @property
    def name(self) -> str:
        return self.url.rstrip("/").rpartition("/")[2]
