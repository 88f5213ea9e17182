"""Datasets of words, sounds, tables and points with libraries' transforms, as people write them."""

import random
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils.data import Dataset

from benchmarks.dataset_parts import CLASSES, COUNT, Counted, Transformed, images, library, sounds


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


class MaskedWords(Counted):
    """transformers' collator masks the words, of one sample here."""

    def __init__(self) -> None:
        self.dataset, self.encode = huggingface(), tokenizer()
        self.collate = library("transformers").DataCollatorForLanguageModeling(self.encode)

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


class Table(Counted):
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


def geometric() -> Dataset[Any]:
    transforms, data = library("torch_geometric.transforms"), library("torch_geometric.data")
    cloud = torch.from_numpy(images()).float().flatten(1)[:, :60].reshape(COUNT, 20, 3) / 255
    moved = transforms.Compose(
        [transforms.RandomJitter(0.01), transforms.RandomRotate(15), transforms.RandomScale((0.9, 1.1))]
    )
    return Transformed(cloud, lambda points: moved(data.Data(pos=points)).pos)


class Tsaug(Counted):
    """Time series, whose augmenters draw from the system's numbers unless they are given a seed."""

    def __init__(self) -> None:
        self.series = sounds()[:, :200]

    def __getitem__(self, index: int) -> Any:
        augment = library("tsaug").AddNoise(scale=0.01, seed=self.seed())
        return augment.augment(self.series[index][None])[0].astype(np.float32), index % CLASSES

    def seed(self) -> int | None:
        return None


class TsaugAnew(Tsaug):
    def seed(self) -> int | None:
        return int(np.random.randint(2**31))


class Memmapped(Counted):
    """Tokens in one file, of which a window is drawn, as nanoGPT's."""

    def __init__(self) -> None:
        self.path = Path(tempfile.gettempdir(), "benchmarks-datasets.bin")
        if not self.path.exists():
            np.random.default_rng(5).integers(0, 256, 10_000).astype(np.uint16).tofile(self.path)

    def __getitem__(self, index: int) -> Any:
        tokens = np.memmap(self.path, np.uint16, "r")
        start = torch.randint(len(tokens) - 17, (1,)).item()
        return torch.from_numpy(tokens[start : start + 16].astype(np.int64)), index % CLASSES
