"""A Transformer that continues a text character by character, trained on the help that comes with Python."""

import math
from pydoc_data.topics import topics

import torch
from torch import Tensor, nn

from flyte_ddp import Measures, Recipe, schedules

LENGTH, CHARACTERS = 64, 128  # length of a window; number of ASCII characters, of which 0 pads short windows


class Transformer(nn.Module):
    def __init__(self, width: int, layers: int, dropout: float):
        super().__init__()
        self.characters, self.places = nn.Embedding(CHARACTERS, width), nn.Embedding(LENGTH, width)
        layer = nn.TransformerEncoderLayer(width, 4, 4 * width, dropout, batch_first=True, norm_first=True)
        self.blocks = nn.TransformerEncoder(layer, layers, nn.LayerNorm(width), enable_nested_tensor=False)
        self.head = nn.Linear(width, CHARACTERS)

    def forward(self, text: Tensor) -> Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(text.shape[1], device=text.device)
        return self.head(self.blocks(self.characters(text) + self.places.weight, mask, is_causal=True))


class CharLM(Recipe):
    samples, headline, lower_is_better, clip_norm = "windows", "perplexity", ("perplexity",), 1.0
    fsdp_units = ("blocks.layers.*",)

    def data(self, split: str) -> Tensor:
        text = "\n\n".join(topics[name] for name in sorted(topics))[: self.settings.characters]
        paragraphs = [part for n, part in enumerate(text.split("\n\n")) if (n % 10 == 0) == (split == "test")]
        windows = [part[i : i + LENGTH + 1] for part in paragraphs for i in range(0, len(part) - 1, LENGTH)]
        return torch.tensor([list(window.encode("ascii", "replace").ljust(LENGTH + 1, b"\0")) for window in windows])

    def model(self) -> nn.Module:
        return Transformer(self.settings.width, self.settings.layers, self.settings.dropout)

    def forward(self, model: nn.Module, batch: Tensor) -> Tensor:
        return model(batch[:, :-1])

    def measure(self, outputs: Tensor, batch: Tensor) -> Measures:
        target, is_text = batch[:, 1:], batch[:, 1:] != 0
        loss = nn.functional.cross_entropy(outputs.float().mT, target, reduction="none", ignore_index=0)
        right = (outputs.argmax(2) == target) & is_text
        return {"loss": (loss.sum(1), is_text.sum(1)), "accuracy": (right.sum(1), is_text.sum(1))}

    def derive(self, measures: dict[str, float]) -> dict[str, float]:
        return {**measures, "perplexity": math.exp(measures["loss"])}

    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        hp = self.settings
        decayed = [p for p in model.parameters() if p.ndim > 1]
        others = [p for p in model.parameters() if p.ndim == 1]  # biases and norms
        groups = [{"params": decayed, "weight_decay": hp.weight_decay}, {"params": others, "weight_decay": 0}]
        return torch.optim.AdamW(groups, hp.learning_rate, fused=True)

    def lr_lambda(self, step: int, steps: int) -> float:
        return schedules.cosine(step, steps, warmup_fraction=0.1)
