"""Datasets of images with libraries' transforms, as people write them."""

import random
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils.data import ConcatDataset, Dataset, Subset, TensorDataset, random_split

from benchmarks.dataset_parts import CLASSES, COUNT, SIZE, Counted, Transformed, images, library, pictures


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


class Boxes(Counted):
    """Detection, as torchvision's tutorial has it: boxes and masks are moved with their image."""

    def __init__(self) -> None:
        v2, image = library("torchvision.transforms.v2"), library("torchvision.tv_tensors").Image
        self.images = images()
        self.transform = v2.Compose([
            v2.RandomPhotometricDistort(), v2.RandomZoomOut(fill=127), v2.RandomHorizontalFlip(),
            v2.Resize((SIZE, SIZE)), v2.ToDtype({image: torch.float32, "others": None}, scale=True),
        ])  # fmt: skip

    def __getitem__(self, index: int) -> Any:
        tv_tensors = library("torchvision.tv_tensors")
        image = tv_tensors.Image(torch.from_numpy(self.images[index]).permute(2, 0, 1))
        corner = torch.tensor([[4.0, 4.0, 20.0, 24.0]])
        boxes = tv_tensors.BoundingBoxes(corner, format="XYXY", canvas_size=(SIZE, SIZE))
        mask = tv_tensors.Mask(torch.zeros(1, SIZE, SIZE, dtype=torch.uint8))
        image, target = self.transform(image, {"boxes": boxes, "masks": mask})
        return {"image": image, "target": target}, index % CLASSES


class TwoViews(Counted):
    def __init__(self) -> None:
        v2 = library("torchvision.transforms.v2")
        self.images = pictures()
        self.view = v2.Compose([v2.RandomResizedCrop(SIZE), v2.RandomSolarize(128, p=0.2), v2.PILToTensor()])

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


class Mosaic(Counted):
    """Four images in one, of which three are drawn, as YOLO's."""

    def __init__(self) -> None:
        self.images = images()

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


class Albumented(Counted):
    def __init__(self) -> None:
        self.images, self.transform = images(), albumentation()

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


class Monai(Counted):
    """MONAI's dictionaries, whose transforms hold a RandomState each."""

    def __init__(self) -> None:
        transforms = library("monai.transforms")
        self.transform = transforms.Compose([
            transforms.EnsureChannelFirstd("image", channel_dim=-1), transforms.ScaleIntensityd("image"),
            transforms.RandFlipd("image", prob=0.5), transforms.RandGaussianNoised("image", prob=0.5),
            transforms.RandAffined("image", prob=0.5, rotate_range=0.3, padding_mode="zeros"),
        ])  # fmt: skip
        self.samples = [{"image": image.astype(np.float32)} for image in images()]

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


def timm() -> Dataset[Any]:
    create = library("timm.data").create_transform
    return Transformed(
        pictures(), create((3, SIZE, SIZE), is_training=True, auto_augment="rand-m9-mstd0.5", re_prob=0.25)
    )


class InHdf5(Counted):
    """Opened in a worker, at first use, as h5py's users are told."""

    def __init__(self) -> None:
        h5py = library("h5py")
        self.path = Path(tempfile.gettempdir(), "benchmarks-datasets.h5")
        if not self.path.exists():
            with h5py.File(self.path, "w") as file:
                file["images"] = images()
        self.file: Any = None

    def __getitem__(self, index: int) -> Any:
        if self.file is None:
            self.file = library("h5py").File(self.path)["images"]
        row, column = np.random.randint(0, 8, 2)
        return self.file[index, row : row + 24, column : column + 24], index % CLASSES


class InHdf5AtOnce(InHdf5):
    def __init__(self) -> None:
        super().__init__()
        self.file = library("h5py").File(self.path)["images"]


class Skimage(Counted):
    """random_noise draws from a generator of its own, whose seed is the system's."""

    def __init__(self) -> None:
        self.images = images()

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


class OpenCv(Counted):
    def __init__(self) -> None:
        self.images = images()

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


class Held(Counted):
    """A generator of its own, made in __init__."""

    def __init__(self) -> None:
        self.images, self.rng = images(), np.random.default_rng(0)

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
