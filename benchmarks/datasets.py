"""Datasets with other libraries' transforms, as people write them, and a recipe that trains on one of them."""

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
from torch.utils.data import ConcatDataset, Dataset, Subset, TensorDataset, random_split

from flyte_ddp.engine.torch_compat import pytree
from flyte_ddp.fields import setting
from flyte_ddp.recipe import Measures, Recipe
from flyte_ddp.settings import TrainingSettings

COUNT, SIZE, CLASSES = 30, 32, 4


def library(name: str) -> Any:
    return importlib.import_module(name)


def images(count: int = COUNT) -> np.ndarray:
    return np.random.default_rng(1).integers(0, 256, (count, SIZE, SIZE, 3), dtype=np.uint8)


def pictures(count: int = COUNT) -> list[Any]:
    return [library("PIL.Image").fromarray(image) for image in images(count)]


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


def torchvision_v2() -> Dataset[Any]:
    v2 = library("torchvision.transforms.v2")
    return Transformed(
        pictures(),
        v2.Compose([
            v2.RandomResizedCrop(SIZE, (0.5, 1)), v2.RandomHorizontalFlip(), v2.ColorJitter(0.4, 0.4, 0.4, 0.1),
            v2.RandomApply([v2.GaussianBlur(3)], p=0.3), v2.ToImage(), v2.ToDtype(torch.float32, scale=True),
            v2.RandomErasing(0.3), v2.Normalize([0.5] * 3, [0.25] * 3),
        ]),
    )  # fmt: skip


def torchvision_v1() -> Dataset[Any]:
    transforms = library("torchvision.transforms")
    return Transformed(
        pictures(),
        transforms.Compose([
            transforms.RandomCrop(SIZE, padding=4), transforms.RandomPerspective(), transforms.RandomRotation(15),
            transforms.RandomChoice([transforms.RandomGrayscale(0.5), transforms.RandomInvert()]),
            transforms.ToTensor(), transforms.Lambda(lambda image: image + 0.01 * torch.randn_like(image)),
        ]),
    )  # fmt: skip


def torchvision_policies() -> Dataset[Any]:
    v2 = library("torchvision.transforms.v2")
    policies = [v2.AutoAugment(), v2.RandAugment(), v2.TrivialAugmentWide(), v2.AugMix()]
    return Transformed(pictures(), v2.Compose([v2.RandomChoice(policies), v2.PILToTensor()]))


class Boxes(Dataset[Any]):
    """Detection, as torchvision's tutorial has it: boxes and masks are moved with their image."""

    def __init__(self) -> None:
        v2, image = library("torchvision.transforms.v2"), library("torchvision.tv_tensors").Image
        self.images = images()
        self.transform = v2.Compose([
            v2.RandomPhotometricDistort(), v2.RandomZoomOut(fill=127), v2.RandomHorizontalFlip(),
            v2.Resize((SIZE, SIZE)), v2.ToDtype({image: torch.float32, "others": None}, scale=True),
        ])  # fmt: skip

    def __len__(self) -> int:
        return COUNT

    def __getitem__(self, index: int) -> Any:
        tv_tensors = library("torchvision.tv_tensors")
        image = tv_tensors.Image(torch.from_numpy(self.images[index]).permute(2, 0, 1))
        corner = torch.tensor([[4.0, 4.0, 20.0, 24.0]])
        boxes = tv_tensors.BoundingBoxes(corner, format="XYXY", canvas_size=(SIZE, SIZE))
        mask = tv_tensors.Mask(torch.zeros(1, SIZE, SIZE, dtype=torch.uint8))
        image, target = self.transform(image, {"boxes": boxes, "masks": mask})
        return {"image": image, "target": target}, index % CLASSES


class TwoViews(Dataset[Any]):
    def __init__(self) -> None:
        v2 = library("torchvision.transforms.v2")
        self.images = pictures()
        self.view = v2.Compose([v2.RandomResizedCrop(SIZE), v2.RandomSolarize(128, p=0.2), v2.PILToTensor()])

    def __len__(self) -> int:
        return COUNT

    def __getitem__(self, index: int) -> Any:
        return [self.view(self.images[index]), self.view(self.images[index])], index % CLASSES


def image_folder() -> Dataset[Any]:
    folder = Path(tempfile.gettempdir(), "benchmarks-datasets-images")
    for index, picture in enumerate(pictures()):
        place = folder / f"class-{index % CLASSES}" / f"{index}.png"
        if not place.exists():
            place.parent.mkdir(parents=True, exist_ok=True)
            picture.save(place)
    v2 = library("torchvision.transforms.v2")
    shifted = v2.Compose([v2.RandomAffine(10, (0.1, 0.1)), v2.PILToTensor(), v2.ToDtype(torch.float32, scale=True)])
    found: Dataset[Any] = library("torchvision.datasets").ImageFolder(folder, shifted, lambda label: label)
    return found


class Mosaic(Dataset[Any]):
    """Four images in one, of which three are drawn, as YOLO's."""

    def __init__(self) -> None:
        self.images = images()

    def __len__(self) -> int:
        return COUNT

    def __getitem__(self, index: int) -> Any:
        others = [index, *random.choices(range(COUNT), k=3)]
        half = SIZE // 2
        corners = [self.images[other][::2, ::2] for other in others]
        mosaic = np.zeros((SIZE, SIZE, 3), np.uint8)
        for corner, (row, column) in zip(corners, ((0, 0), (0, half), (half, 0), (half, half)), strict=True):
            mosaic[row : row + half, column : column + half] = corner
        if np.random.rand() < 0.5:
            mosaic = mosaic[:, ::-1]
        return np.ascontiguousarray(mosaic.transpose(2, 0, 1)), index % CLASSES


def albumentation() -> Any:
    A = library("albumentations")
    return A.Compose([
        A.RandomResizedCrop((SIZE, SIZE)), A.HorizontalFlip(), A.RandomBrightnessContrast(), A.GaussNoise(),
        A.CoarseDropout(), A.OneOf([A.MotionBlur(), A.ElasticTransform()]), A.Normalize(),
        library("albumentations.pytorch").ToTensorV2(),
    ])  # fmt: skip


class Albumented(Dataset[Any]):
    def __init__(self) -> None:
        self.images, self.transform = images(), albumentation()

    def __len__(self) -> int:
        return COUNT

    def __getitem__(self, index: int) -> Any:
        return self.transform(image=self.images[index])["image"], index % CLASSES


class AlbumentedAnew(Albumented):
    def __getitem__(self, index: int) -> Any:
        self.transform.set_random_seed(torch.randint(2**31, ()).item())
        return super().__getitem__(index)


class AlbumentedInside(Albumented):
    """Composes for each sample."""

    def __getitem__(self, index: int) -> Any:
        return albumentation()(image=self.images[index])["image"], index % CLASSES


class AlbumentedMasks(Albumented):
    """Segmentation, with keypoints, beside their image."""

    def __init__(self) -> None:
        super().__init__()
        A = library("albumentations")
        self.transform = A.Compose([A.Affine(rotate=(-20, 20), p=1), A.RandomGamma()],
                                   keypoint_params=A.KeypointParams("xy", remove_invisible=False))  # fmt: skip

    def __getitem__(self, index: int) -> Any:
        self.transform.set_random_seed(torch.randint(2**31, ()).item())
        image = self.images[index]
        found = self.transform(image=image, mask=image[..., 0], keypoints=np.array([[3.0, 4.0], [20.0, 9.0]]))
        return {name: found[name] for name in ("image", "mask", "keypoints")}, index % CLASSES


def kornia() -> Dataset[Any]:
    K = library("kornia.augmentation")
    augment = K.AugmentationSequential(K.RandomAffine(15.0), K.RandomErasing(), K.ColorJiggle(0.1, 0.1, 0.1, 0.1))
    return Transformed(torch.from_numpy(images()).permute(0, 3, 1, 2).float() / 255, lambda image: augment(image)[0])


class Monai(Dataset[Any]):
    """MONAI's dictionaries, whose transforms hold a RandomState each."""

    def __init__(self) -> None:
        transforms = library("monai.transforms")
        self.transform = transforms.Compose([
            transforms.EnsureChannelFirstd("image", channel_dim=-1), transforms.ScaleIntensityd("image"),
            transforms.RandFlipd("image", prob=0.5), transforms.RandGaussianNoised("image", prob=0.5),
            transforms.RandAffined("image", prob=0.5, rotate_range=0.3, padding_mode="zeros"),
        ])  # fmt: skip
        self.samples = [{"image": image.astype(np.float32)} for image in images()]

    def __len__(self) -> int:
        return COUNT

    def __getitem__(self, index: int) -> Any:
        return self.transform(self.samples[index])["image"], index % CLASSES


class MonaiAnew(Monai):
    def __getitem__(self, index: int) -> Any:
        self.transform.set_random_state(seed=torch.randint(2**31, ()).item())
        return super().__getitem__(index)


def monai_cached() -> Dataset[Any]:
    """MONAI's own Dataset, which keeps what its first, fixed transforms return."""
    transforms, data = library("monai.transforms"), library("monai.data")
    samples = [{"image": image.astype(np.float32), "label": index % CLASSES} for index, image in enumerate(images())]
    steps = [transforms.EnsureChannelFirstd("image", channel_dim=-1), transforms.RandRotated("image", 0.4, prob=0.5)]
    found: Dataset[Any] = data.CacheDataset(samples, transforms.Compose(steps), progress=False)
    return found


def monai_cached_anew() -> Dataset[Any]:
    class Anew(library("monai.data").CacheDataset):  # type: ignore[misc]
        def __getitem__(self, index: int) -> Any:
            self.transform.set_random_state(torch.randint(2**31, ()).item())
            return super().__getitem__(index)

    cached: Any = monai_cached()
    cached.__class__ = Anew
    found: Dataset[Any] = cached
    return found


def torchio() -> Dataset[Any]:
    tio = library("torchio")
    volumes = torch.from_numpy(images()).float().permute(0, 3, 1, 2)[:, :1, :, :, None]
    subjects = [tio.Subject(scan=tio.ScalarImage(tensor=volume), label=index % CLASSES)
                for index, volume in enumerate(volumes)]  # fmt: skip
    moved = tio.SubjectsDataset(subjects, tio.Compose([tio.RandomNoise(), tio.RandomBiasField(), tio.RandomFlip()]))
    return Transformed(moved, lambda subject: subject["scan"][tio.DATA])


def audiomentations() -> Dataset[Any]:
    library_ = library("audiomentations")
    augment = library_.Compose([
        library_.AddGaussianNoise(p=0.5), library_.Gain(p=0.5), library_.Shift(p=0.5), library_.TimeMask(p=0.5),
        library_.PolarityInversion(p=0.5),
    ])  # fmt: skip
    return Transformed(sounds(), lambda sound: augment(samples=sound, sample_rate=16000))


def huggingface() -> Any:
    words = np.random.default_rng(3)
    texts = [" ".join(f"w{word}" for word in words.integers(0, 90, 12)) for _ in range(COUNT)]
    labels = [index % CLASSES for index in range(COUNT)]
    return library("datasets").Dataset.from_dict({"text": texts, "label": labels})


def tokenizer() -> Any:
    tokenizers = library("tokenizers")
    vocabulary = {"[PAD]": 0, "[UNK]": 1, "[MASK]": 2, **{f"w{word}": 3 + word for word in range(90)}}
    words = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token="[UNK]"))
    words.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    return library("transformers").PreTrainedTokenizerFast(
        tokenizer_object=words, pad_token="[PAD]", unk_token="[UNK]", mask_token="[MASK]"
    )


def huggingface_mapped() -> Dataset[Any]:
    encode = tokenizer()
    mapped = huggingface().map(lambda rows: encode(rows["text"], padding="max_length", max_length=16), batched=True)
    mapped.set_format("torch", columns=["input_ids", "attention_mask", "label"])
    found: Dataset[Any] = mapped
    return found


def huggingface_transform() -> Dataset[Any]:
    """Words dropped on the fly, with set_transform."""
    encode = tokenizer()

    def drop(rows: Any) -> Any:
        texts = [" ".join(word for word in text.split() if random.random() > 0.1) for text in rows["text"]]
        encoded = encode(texts, padding="max_length", max_length=16, return_tensors="np")
        return {"input_ids": encoded["input_ids"], "label": rows["label"]}

    dataset = huggingface()
    dataset.set_transform(drop)
    found: Dataset[Any] = dataset
    return found


class MaskedWords(Dataset[Any]):
    """transformers' collator masks the words, of one sample here."""

    def __init__(self) -> None:
        self.dataset, self.encode = huggingface(), tokenizer()
        self.collate = library("transformers").DataCollatorForLanguageModeling(self.encode)

    def __len__(self) -> int:
        return COUNT

    def __getitem__(self, index: int) -> Any:
        row = self.dataset[index]
        masked = self.collate([self.encode(row["text"], padding="max_length", max_length=16)])
        return masked["input_ids"][0], row["label"]


class Encoded(MaskedWords):
    """A sample is what the tokenizer returns, which is no dict."""

    def __getitem__(self, index: int) -> Any:
        row = self.dataset[index]
        encoded = self.encode(row["text"], padding="max_length", max_length=16, return_tensors="pt")
        encoded["label"] = row["label"]
        return encoded


def timm() -> Dataset[Any]:
    create = library("timm.data").create_transform
    return Transformed(
        pictures(), create((3, SIZE, SIZE), is_training=True, auto_augment="rand-m9-mstd0.5", re_prob=0.25)
    )


class InHdf5(Dataset[Any]):
    """Opened in a worker, at first use, as h5py's users are told."""

    def __init__(self) -> None:
        h5py = library("h5py")
        self.path = Path(tempfile.gettempdir(), "benchmarks-datasets.h5")
        if not self.path.exists():
            with h5py.File(self.path, "w") as file:
                file["images"] = images()
        self.file: Any = None

    def __len__(self) -> int:
        return COUNT

    def __getitem__(self, index: int) -> Any:
        if self.file is None:
            self.file = library("h5py").File(self.path)["images"]
        row, column = np.random.randint(0, 8, 2)
        return self.file[index, row : row + 24, column : column + 24], index % CLASSES


class InHdf5AtOnce(InHdf5):
    def __init__(self) -> None:
        super().__init__()
        self.file = library("h5py").File(self.path)["images"]


class Table(Dataset[Any]):
    def __init__(self) -> None:
        draws = np.random.default_rng(4)
        self.frame = library("pandas").DataFrame(draws.normal(size=(COUNT, 8)).astype("float32"))
        self.frame["label"] = np.arange(COUNT) % CLASSES

    def __len__(self) -> int:
        return len(self.frame)

    def __getitem__(self, index: int) -> Any:
        row = self.frame.iloc[index]
        features = row.drop("label").to_numpy(dtype="float32")
        features[np.random.permutation(8)[:2]] = 0
        return features, int(row["label"])


class Skimage(Dataset[Any]):
    """random_noise draws from a generator of its own, whose seed is the system's."""

    def __init__(self) -> None:
        self.images = images()

    def __len__(self) -> int:
        return COUNT

    def __getitem__(self, index: int) -> Any:
        skimage = library("skimage")
        turned = library("skimage.transform").rotate(self.images[index], random.uniform(-15, 15))
        noisy = library("skimage.util").random_noise(turned, **self.generator())
        return skimage.img_as_float32(noisy), index % CLASSES

    def generator(self) -> dict[str, Any]:
        return {}


class SkimageAnew(Skimage):
    def generator(self) -> dict[str, Any]:
        return {"rng": np.random.randint(2**31)}


class OpenCv(Dataset[Any]):
    def __init__(self) -> None:
        self.images = images()

    def __len__(self) -> int:
        return COUNT

    def __getitem__(self, index: int) -> Any:
        cv2 = library("cv2")
        turn = cv2.getRotationMatrix2D((SIZE / 2, SIZE / 2), np.random.uniform(-20, 20), random.uniform(0.9, 1.1))
        turned = cv2.warpAffine(self.images[index], turn, (SIZE, SIZE), borderMode=cv2.BORDER_REFLECT)
        return self.noisy(cv2, turned.astype(np.float32)), index % CLASSES

    def noisy(self, cv2: Any, image: np.ndarray) -> np.ndarray:
        return image


class OpenCvDraws(OpenCv):
    """OpenCV's own generator, which goes on from call to call in its library."""

    def noisy(self, cv2: Any, image: np.ndarray) -> np.ndarray:
        noise = np.empty_like(image)
        cv2.randn(noise, 0, 5)
        return image + noise


class OpenCvAnew(OpenCvDraws):
    def noisy(self, cv2: Any, image: np.ndarray) -> np.ndarray:
        cv2.setRNGSeed(random.getrandbits(31))
        return super().noisy(cv2, image)


def geometric() -> Dataset[Any]:
    transforms, data = library("torch_geometric.transforms"), library("torch_geometric.data")
    cloud = torch.from_numpy(images()).float().flatten(1)[:, :60].reshape(COUNT, 20, 3) / 255
    moved = transforms.Compose(
        [transforms.RandomJitter(0.01), transforms.RandomRotate(15), transforms.RandomScale((0.9, 1.1))]
    )
    return Transformed(cloud, lambda points: moved(data.Data(pos=points)).pos)


class Tsaug(Dataset[Any]):
    """Time series, whose augmenters draw from the system's numbers unless they are given a seed."""

    def __init__(self) -> None:
        self.series = sounds()[:, :200]

    def __len__(self) -> int:
        return COUNT

    def __getitem__(self, index: int) -> Any:
        augment = library("tsaug").AddNoise(scale=0.01, seed=self.seed())
        return augment.augment(self.series[index][None])[0].astype(np.float32), index % CLASSES

    def seed(self) -> int | None:
        return None


class TsaugAnew(Tsaug):
    def seed(self) -> int | None:
        return int(np.random.randint(2**31))


class Held(Dataset[Any]):
    """A generator of its own, made in __init__."""

    def __init__(self) -> None:
        self.images, self.rng = images(), np.random.default_rng(0)

    def __len__(self) -> int:
        return COUNT

    def __getitem__(self, index: int) -> Any:
        return self.images[index] * self.rng.uniform(0.5, 1), index % CLASSES


class HeldAnew(Held):
    def __getitem__(self, index: int) -> Any:
        self.rng = np.random.default_rng(int(torch.randint(2**31, ())))
        return super().__getitem__(index)


def concatenated() -> Dataset[Any]:
    """torch's own: two sets in one, a part that was split off at random, a choice of indices."""
    first, _ = random_split(torchvision_v2(), [20, 10])
    chosen: Dataset[Any] = ConcatDataset([first, Subset(torchvision_v2(), [*range(5, 15)])])
    return chosen


def tensors() -> Dataset[Any]:
    return TensorDataset(torch.from_numpy(images()).float(), torch.arange(COUNT) % CLASSES)


class Memmapped(Dataset[Any]):
    """Tokens in one file, of which a window is drawn, as nanoGPT's."""

    def __init__(self) -> None:
        self.path = Path(tempfile.gettempdir(), "benchmarks-datasets.bin")
        if not self.path.exists():
            np.random.default_rng(5).integers(0, 256, 10_000).astype(np.uint16).tofile(self.path)

    def __len__(self) -> int:
        return COUNT

    def __getitem__(self, index: int) -> Any:
        tokens = np.memmap(self.path, np.uint16, "r")
        start = torch.randint(len(tokens) - 17, (1,)).item()
        return torch.from_numpy(tokens[start : start + 16].astype(np.int64)), index % CLASSES


DATASETS: dict[str, Callable[[], Any]] = {
    "torchvision v2: crop, flip, colour, erase": torchvision_v2,
    "torchvision v1, with a lambda that draws": torchvision_v1,
    "torchvision: Auto-, RandAugment, TrivialAugmentWide, AugMix": torchvision_policies,
    "torchvision: boxes and masks": Boxes,
    "torchvision: two views": TwoViews,
    "torchvision: ImageFolder": image_folder,
    "random, NumPy: mosaic of other samples": Mosaic,
    "albumentations *": Albumented,
    "albumentations, seeded": AlbumentedAnew,
    "albumentations, composed for each sample *": AlbumentedInside,
    "albumentations: masks and keypoints, seeded": AlbumentedMasks,
    "kornia": kornia,
    "MONAI *": Monai,
    "MONAI, seeded": MonaiAnew,
    "MONAI's CacheDataset *": monai_cached,
    "MONAI's CacheDataset, seeded": monai_cached_anew,
    "TorchIO": torchio,
    "audiomentations": audiomentations,
    "datasets, mapped": huggingface_mapped,
    "datasets, set_transform": huggingface_transform,
    "transformers: masked words": MaskedWords,
    "transformers: BatchEncoding": Encoded,
    "timm: create_transform": timm,
    "h5py, opened at first use": InHdf5,
    "h5py, opened at once": InHdf5AtOnce,
    "pandas": Table,
    "scikit-image: random_noise *": Skimage,
    "scikit-image: random_noise, seeded": SkimageAnew,
    "OpenCV, NumPy's numbers": OpenCv,
    "OpenCV's own numbers *": OpenCvDraws,
    "OpenCV's own numbers, seeded": OpenCvAnew,
    "PyTorch Geometric": geometric,
    "tsaug *": Tsaug,
    "tsaug, seeded": TsaugAnew,
    "a Generator in __init__ *": Held,
    "a Generator in __init__, seeded": HeldAnew,
    "torch: ConcatDataset, Subset, random_split": concatenated,
    "torch: TensorDataset": tensors,
    "memmap, windows drawn": Memmapped,
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
