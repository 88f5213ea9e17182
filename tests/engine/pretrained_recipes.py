"""Recipes that start from a folder of a small encoder's weights, and such folders."""

from typing import Any

import torch
from huggingface_hub import constants
from peft import LoraConfig, get_peft_model
from transformers import BertConfig, BertForSequenceClassification

from flyte_ddp.recipes.classifier import Classifier

SMALL: Any = {"vocab_size": 50, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "num_labels": 2}
KIND = BertForSequenceClassification


def save_encoder(folder, seed=0, dtype=torch.float32):
    """In several files, as large models are."""
    torch.manual_seed(seed)
    KIND(BertConfig(**SMALL, intermediate_size=64)).to(dtype).save_pretrained(folder, max_shard_size="30KB")


class Tuned(Classifier):
    def data(self, split):
        words = torch.arange(12 * 6).view(12, 6) * 7 % 49 + 1
        return words, words[:, 0] % 2

    def model(self) -> Any:
        return KIND.from_pretrained(self.init_path, dtype=torch.float32)

    def forward(self, model, batch):
        return model(input_ids=batch[0]).logits


class Adapted(Tuned):
    def model(self):
        return get_peft_model(KIND.from_pretrained(self.init_path), LoraConfig(r=1, target_modules=["query", "value"]))


class Untyped(Tuned):
    def model(self):
        return KIND.from_pretrained(self.init_path)


class Anew(Tuned):
    def model(self):
        return KIND(BertConfig(**SMALL))


class FromTheHub(Tuned):
    def model(self):
        assert constants.HF_HUB_OFFLINE
        return KIND.from_pretrained("someone/something")
