"""Datasets with other libraries' transforms, as people write them, and a recipe that trains on one of them."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from benchmarks import image_datasets as images
from benchmarks import other_datasets as others
from benchmarks.dataset_parts import CLASSES
from flyte_ddp.engine.torch_compat import pytree
from flyte_ddp.fields import setting
from flyte_ddp.recipe import Measures, Recipe
from flyte_ddp.settings import TrainingSettings

DATASETS: dict[str, Callable[[], Any]] = {
    "torchvision v2: crop, flip, colour, erase": images.torchvision_v2,
    "torchvision v1, with a lambda that draws": images.torchvision_v1,
    "torchvision: Auto-, RandAugment, TrivialAugmentWide, AugMix": images.torchvision_policies,
    "torchvision: boxes and masks": images.Boxes,
    "torchvision: two views": images.TwoViews,
    "torchvision: ImageFolder": images.image_folder,
    "random, NumPy: mosaic of other samples": images.Mosaic,
    "albumentations *": images.Albumented,
    "albumentations, seeded": images.AlbumentedAnew,
    "albumentations, composed for each sample *": images.AlbumentedInside,
    "albumentations: masks and keypoints, seeded": images.AlbumentedMasks,
    "kornia": images.kornia,
    "MONAI *": images.Monai,
    "MONAI, seeded": images.MonaiAnew,
    "MONAI's CacheDataset *": images.monai_cached,
    "MONAI's CacheDataset, seeded": images.monai_cached_anew,
    "TorchIO": images.torchio,
    "audiomentations": others.audiomentations,
    "datasets, mapped": others.huggingface_mapped,
    "datasets, set_transform": others.huggingface_transform,
    "transformers: masked words": others.MaskedWords,
    "transformers: BatchEncoding": others.Encoded,
    "timm: create_transform": images.timm,
    "h5py, opened at first use": images.InHdf5,
    "h5py, opened at once": images.InHdf5AtOnce,
    "pandas": others.Table,
    "scikit-image: random_noise *": images.Skimage,
    "scikit-image: random_noise, seeded": images.SkimageAnew,
    "OpenCV, NumPy's numbers": images.OpenCv,
    "OpenCV's own numbers *": images.OpenCvDraws,
    "OpenCV's own numbers, seeded": images.OpenCvAnew,
    "PyTorch Geometric": others.geometric,
    "tsaug *": others.Tsaug,
    "tsaug, seeded": others.TsaugAnew,
    "a Generator in __init__ *": images.Held,
    "a Generator in __init__, seeded": images.HeldAnew,
    "torch: ConcatDataset, Subset, random_split": images.concatenated,
    "torch: TensorDataset": images.tensors,
    "memmap, windows drawn": others.Memmapped,
}


@dataclass(frozen=True)
class Settings(TrainingSettings):
    batch_size: int = 12
    epochs: int = 2
    precision: str = setting("float32", choices=("float32",))
    virtual_ranks: int = 6
    dataset: str = setting("", choices=("", *DATASETS))


class Classified(Recipe):
    """A small network on all numbers of a sample."""

    settings: Settings

    def data(self, split: str) -> Any:
        return DATASETS[self.settings.dataset]()

    def model(self) -> nn.Module:
        inputs, _ = parted(self.data("train")[0])
        size = sum(np.asarray(leaf).size for leaf in pytree.tree_leaves(inputs))
        return nn.Sequential(nn.Linear(size, 16), nn.ReLU(), nn.Linear(16, CLASSES))

    def forward(self, model: nn.Module, batch: Any) -> Tensor:
        inputs, _ = parted(batch)
        logits: Tensor = model(torch.cat([leaf.flatten(1).float() for leaf in pytree.tree_leaves(inputs)], 1))
        return logits

    def measure(self, outputs: Tensor, batch: Any) -> Measures:
        return {"loss": functional.cross_entropy(outputs, parted(batch)[1], reduction="none")}


def parted(batch: Any) -> tuple[Any, Any]:
    """The inputs and the label of a sample, or of a batch of them."""
    if isinstance(batch, Mapping):
        return {name: value for name, value in batch.items() if name != "label"}, batch["label"]
    return batch[0], batch[-1]
