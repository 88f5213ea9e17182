"""A BERT-like encoder of transformers that learns which chapter of Python's help a sentence is from."""

from pydoc_data.topics import topics
from typing import Any

import torch
from peft import LoraConfig, TaskType, get_peft_model
from torch import Tensor, nn
from torch.utils.data import Dataset
from transformers import AutoModelForSequenceClassification

from flyte_ddp import Classifier, schedules

CHAPTERS = "debugger", "formatstrings", "string-methods", "typesmapping"
LONGEST = 200  # bytes of a sentence


class Sentences(Dataset):
    """Sentences as bytes, so that no tokenizer is needed; the byte 0 is padding."""

    def __init__(self, split: str):
        rows = []
        for label, chapter in enumerate(CHAPTERS):
            sentences = " ".join(topics[chapter].split()).split(". ")
            rows += ((text[:LONGEST], label) for text in sentences if len(text) > 20)
        self.rows = [row for number, row in enumerate(rows) if (number % 5 == 0) == (split == "test")]

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> Any:
        text, label = self.rows[index]
        words = torch.tensor(list(text.encode("ascii", "replace")))
        return {"input_ids": words, "attention_mask": torch.ones_like(words)}, label


class FinetuneText(Classifier):
    samples, clip_norm, length_window, fsdp_units = "sentences", 1.0, 10, ("*encoder.layer.*",)

    def data(self, split: str) -> Dataset:
        return Sentences(split)

    def lengths(self, split: str) -> list[int]:
        return [len(text) for text, _ in Sentences(split).rows]

    def model(self) -> nn.Module:
        model = AutoModelForSequenceClassification.from_pretrained(
            self.init_path, num_labels=len(CHAPTERS), dtype=torch.float32
        )
        rank = self.settings.lora_rank
        return get_peft_model(model, LoraConfig(TaskType.SEQ_CLS, r=rank)) if rank else model

    def forward(self, model: nn.Module, batch: Any) -> Tensor:
        words, mask = batch[0]["input_ids"], batch[0]["attention_mask"].bool()
        # If the mask had two dimensions, transformers would ask the device in each step whether anything is masked
        return model(input_ids=words, attention_mask=mask[:, None, None]).logits

    def lr_lambda(self, step: int, steps: int) -> float:
        return schedules.cosine(step, steps, warmup_fraction=0.1)
