r"""Other libraries' transforms, in Datasets as people write them: accepted, and the same bits on 1, 2 and 3 ranks.

    pip install albumentations audiomentations datasets h5py kornia monai opencv-python-headless pandas scikit-image \
        timm torch_geometric torchio transformers tsaug
    python -m benchmarks.transforms                  # monai alone takes 20 s to be imported
    python -m benchmarks.transforms albumentations

Each trains on 1, 2 and 3 ranks, with 0 and 2 loader workers, for two epochs of random samples, with six virtual ranks.
"""

import argparse
import importlib
import random
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import Dataset

from benchmarks.engine import hardware
from flyte_ddp.engine.torch_compat import pytree
from flyte_ddp.errors import InputError
from flyte_ddp.fields import setting
from flyte_ddp.launch.failures import RankError
from flyte_ddp.recipe import Measures, Recipe
from flyte_ddp.settings import RunOptions, TrainingSettings
from flyte_ddp.training import train

RUNS = tuple((ranks, workers) for ranks in (1, 2, 3) for workers in (0, 2))
COUNT, SIZE, CLASSES = 30, 32, 4


def library(name: str) -> Any:
    return importlib.import_module(name)


def images() -> np.ndarray:
    return np.random.default_rng(1).integers(0, 256, (COUNT, SIZE, SIZE, 3), dtype=np.uint8)


def pictures() -> list[Any]:
    return [library("PIL.Image").fromarray(image) for image in images()]


def sounds() -> np.ndarray:
    return np.random.default_rng(2).normal(0, 0.1, (COUNT, 1600)).astype(np.float32)


class Transformed(Dataset[Any]):
    """What most people write: a list, a label, a transform."""

    def __init__(self, samples: Any, transform: Callable[[Any], Any]):
        self.samples, self.transform = samples, transform

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int) -> Any:
        return self.transform(self.samples[index]), index % CLASSES


def torchvision() -> Any:
    v2 = library("torchvision.transforms.v2")
    return Transformed(
        pictures(),
        v2.Compose([
            v2.RandomResizedCrop(SIZE, (0.5, 1)), v2.RandomHorizontalFlip(), v2.ColorJitter(0.4, 0.4, 0.4, 0.1),
            v2.RandomApply([v2.GaussianBlur(3)], p=0.3), v2.ToImage(), v2.ToDtype(torch.float32, scale=True),
            v2.RandomErasing(0.3), v2.Normalize([0.5] * 3, [0.25] * 3),
        ]),
    )  # fmt: skip


def albumentations() -> Any:
    A = library("albumentations")
    transform = A.Compose([
        A.RandomResizedCrop((SIZE, SIZE)), A.HorizontalFlip(), A.RandomBrightnessContrast(), A.GaussNoise(),
        A.CoarseDropout(), A.OneOf([A.MotionBlur(), A.ElasticTransform()]), A.Normalize(),
        library("albumentations.pytorch").ToTensorV2(),
    ])  # fmt: skip

    def seeded(image: np.ndarray) -> Any:
        transform.set_random_seed(torch.randint(2**31, ()).item())
        return transform(image=image)["image"]

    return Transformed(images(), seeded)


def kornia() -> Any:
    K = library("kornia.augmentation")
    augment = K.AugmentationSequential(K.RandomAffine(15.0), K.RandomErasing(), K.ColorJiggle(0.1, 0.1, 0.1, 0.1))
    return Transformed(torch.from_numpy(images()).permute(0, 3, 1, 2).float() / 255, lambda image: augment(image)[0])


def monai() -> Any:
    transforms = library("monai.transforms")
    transform = transforms.Compose([
        transforms.EnsureChannelFirstd("image", channel_dim=-1), transforms.ScaleIntensityd("image"),
        transforms.RandFlipd("image", prob=0.5), transforms.RandGaussianNoised("image", prob=0.5),
        transforms.RandAffined("image", prob=0.5, rotate_range=0.3, padding_mode="zeros"),
    ])  # fmt: skip

    def seeded(image: np.ndarray) -> Any:
        transform.set_random_state(seed=torch.randint(2**31, ()).item())
        return transform({"image": image.astype(np.float32)})["image"]

    return Transformed(images(), seeded)


def torchio() -> Any:
    tio = library("torchio")
    volumes = torch.from_numpy(images()).float().permute(0, 3, 1, 2)[:, :1, :, :, None]
    subjects = [tio.Subject(scan=tio.ScalarImage(tensor=volume)) for volume in volumes]
    moved = tio.SubjectsDataset(subjects, tio.Compose([tio.RandomNoise(), tio.RandomBiasField(), tio.RandomFlip()]))
    return Transformed(moved, lambda subject: subject["scan"][tio.DATA])


def audiomentations() -> Any:
    library_ = library("audiomentations")
    augment = library_.Compose([
        library_.AddGaussianNoise(p=0.5), library_.Gain(p=0.5), library_.Shift(p=0.5), library_.TimeMask(p=0.5),
        library_.PolarityInversion(p=0.5),
    ])  # fmt: skip
    return Transformed(sounds(), lambda sound: augment(samples=sound, sample_rate=16000))


def tokenizer() -> Any:
    tokenizers = library("tokenizers")
    vocabulary = {"[PAD]": 0, "[UNK]": 1, "[MASK]": 2, **{f"w{word}": 3 + word for word in range(90)}}
    words = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token="[UNK]"))
    words.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    return library("transformers").PreTrainedTokenizerFast(
        tokenizer_object=words, pad_token="[PAD]", unk_token="[UNK]", mask_token="[MASK]"
    )


def texts() -> list[str]:
    words = np.random.default_rng(3)
    return [" ".join(f"w{word}" for word in words.integers(0, 90, 12)) for _ in range(COUNT)]


def datasets() -> Any:
    """Words dropped on the fly, with set_transform."""
    encode = tokenizer()

    def drop(rows: Any) -> Any:
        dropped = [" ".join(word for word in text.split() if random.random() > 0.1) for text in rows["text"]]
        encoded = encode(dropped, padding="max_length", max_length=16, return_tensors="np")
        return {"input_ids": encoded["input_ids"], "label": rows["label"]}

    dataset = library("datasets").Dataset.from_dict({"text": texts(), "label": [i % CLASSES for i in range(COUNT)]})
    dataset.set_transform(drop)
    return dataset


def transformers() -> Any:
    """Words masked by transformers' collator, a sample at a time."""
    encode = tokenizer()
    collate = library("transformers").DataCollatorForLanguageModeling(encode)

    def mask(text: str) -> Any:
        return collate([encode(text, padding="max_length", max_length=16)])["input_ids"][0]

    return Transformed(texts(), mask)


def timm() -> Any:
    create = library("timm.data").create_transform
    transform = create((3, SIZE, SIZE), is_training=True, auto_augment="rand-m9-mstd0.5", re_prob=0.25)
    return Transformed(pictures(), transform)


class InHdf5(Transformed):
    """Opened in a worker, at first use, as h5py's users are told."""

    def __init__(self) -> None:
        super().__init__(range(COUNT), self.crop)
        self.path = Path(tempfile.gettempdir(), "benchmarks-datasets.h5")
        if not self.path.exists():
            with library("h5py").File(self.path, "w") as file:
                file["images"] = images()
        self.file: Any = None

    def crop(self, index: int) -> np.ndarray:
        if self.file is None:
            self.file = library("h5py").File(self.path)["images"]
        row, column = np.random.randint(0, 8, 2)
        cropped: np.ndarray = self.file[index, row : row + 24, column : column + 24]
        return cropped


def pandas() -> Any:
    frame = library("pandas").DataFrame(np.random.default_rng(4).normal(size=(COUNT, 8)).astype("float32"))

    def row(index: int) -> np.ndarray:
        features: np.ndarray = frame.iloc[index].to_numpy(dtype="float32", copy=True)
        features[np.random.permutation(8)[:2]] = 0
        return features

    return Transformed(range(COUNT), row)


def skimage() -> Any:
    def noisy(image: np.ndarray) -> Any:
        turned = library("skimage.transform").rotate(image, random.uniform(-15, 15))
        noise = library("skimage.util").random_noise(turned, rng=np.random.randint(2**31))
        return library("skimage").img_as_float32(noise)

    return Transformed(images(), noisy)


def opencv() -> Any:
    def noisy(image: np.ndarray) -> np.ndarray:
        cv2 = library("cv2")
        turn = cv2.getRotationMatrix2D((SIZE / 2, SIZE / 2), np.random.uniform(-20, 20), random.uniform(0.9, 1.1))
        turned = cv2.warpAffine(image, turn, (SIZE, SIZE), borderMode=cv2.BORDER_REFLECT).astype(np.float32)
        noise = np.empty_like(turned)
        cv2.setRNGSeed(random.getrandbits(31))
        cv2.randn(noise, 0, 5)
        return turned + noise

    return Transformed(images(), noisy)


def geometric() -> Any:
    transforms, data = library("torch_geometric.transforms"), library("torch_geometric.data")
    clouds = torch.from_numpy(images()).float().flatten(1)[:, :60].reshape(COUNT, 20, 3) / 255
    moves = [transforms.RandomJitter(0.01), transforms.RandomRotate(15), transforms.RandomScale((0.9, 1.1))]
    moved = transforms.Compose(moves)
    return Transformed(clouds, lambda points: moved(data.Data(pos=points)).pos)


def tsaug() -> Any:
    def noisy(series: np.ndarray) -> np.ndarray:
        noise = library("tsaug").AddNoise(scale=0.01, seed=int(np.random.randint(2**31)))
        augmented: np.ndarray = noise.augment(series[None])[0].astype(np.float32)
        return augmented

    return Transformed(sounds()[:, :200], noisy)


DATASETS: dict[str, Callable[[], Any]] = {
    "torchvision: crop, flip, colour, erase": torchvision,
    "albumentations, seeded": albumentations,
    "kornia": kornia,
    "MONAI, seeded": monai,
    "TorchIO": torchio,
    "audiomentations": audiomentations,
    "datasets, set_transform": datasets,
    "transformers: masked words": transformers,
    "timm: create_transform": timm,
    "h5py, opened at first use": InHdf5,
    "pandas": pandas,
    "scikit-image, seeded": skimage,
    "OpenCV, seeded": opencv,
    "PyTorch Geometric": geometric,
    "tsaug, seeded": tsaug,
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
    return (batch["input_ids"], batch["label"]) if isinstance(batch, Mapping) else batch


def digest_of(name: str, ranks: int, workers: int) -> str:
    options = RunOptions(nproc=ranks, loader_workers=workers)
    with tempfile.TemporaryDirectory() as folder:
        recipe, settings = "benchmarks.transforms:Classified", Settings(dataset=name)
        return train(recipe, settings, options, output=folder, on_event=lambda event: None).digest


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", default=[""], help="parts of their names")
    names = [name for name in DATASETS if any(part in name for part in parser.parse_args().names)]
    print(f"{hardware()}\n\n| a Dataset with | on 1, 2 and 3 ranks, with 0 and 2 workers |\n|---|---|")
    for name in names:
        try:
            digests = {digest_of(name, *run) for run in RUNS}
            found = "the same bits" if len(digests) == 1 else "OTHER BITS"
        except (InputError, RankError) as error:
            found = str(error).splitlines()[0].split(": ", 3)[-1]
        print(f"| {name} | {found} |", flush=True)


if __name__ == "__main__":
    main()
