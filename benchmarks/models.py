"""Well-known architectures of transformers, timm and torchvision, small and with random weights, as one recipe."""

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from flyte_ddp.fields import setting
from flyte_ddp.recipe import Measures, Recipe
from flyte_ddp.settings import TrainingSettings

SAMPLES, CLASSES, LENGTH, WORDS = 60, 4, 16, 100
TEXT: dict[str, Any] = {"vocab_size": WORDS, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
WIDE = {**TEXT, "intermediate_size": 64, "max_position_embeddings": 32}


def transformers(config: str, model: str, **sizes: Any) -> Callable[[], nn.Module]:
    def build() -> nn.Module:
        library = importlib.import_module("transformers")
        found: nn.Module = getattr(library, model)(getattr(library, config)(**{"num_labels": CLASSES, **sizes}))
        return found

    return build


def timm(name: str, **arguments: Any) -> Callable[[], nn.Module]:
    return lambda: importlib.import_module("timm").create_model(name, num_classes=CLASSES, **arguments)


def torchvision(name: str, **arguments: Any) -> Callable[[], nn.Module]:
    return lambda: importlib.import_module("torchvision").models.get_model(name, num_classes=CLASSES, **arguments)


def text(model: nn.Module, batch: tuple[Tensor, ...]) -> Tensor:
    logits: Tensor = model(input_ids=batch[0]).logits
    return logits.flatten(1)[:, :CLASSES]


def translated(model: nn.Module, batch: tuple[Tensor, ...]) -> Tensor:
    logits: Tensor = model(input_ids=batch[0], decoder_input_ids=batch[0]).logits
    return logits[:, -1, :CLASSES]


def speech(model: nn.Module, batch: tuple[Tensor, ...]) -> Tensor:
    found: Tensor = model(batch[0]).last_hidden_state.mean(1)[:, :CLASSES]
    return found


def pooled(model: nn.Module, batch: tuple[Tensor, ...]) -> Tensor:
    found: Tensor = model(batch[0]).pooler_output[:, :CLASSES]
    return found


def image(model: nn.Module, batch: tuple[Tensor, ...]) -> Tensor:
    outputs = model(batch[0])
    logits: Tensor = outputs if isinstance(outputs, Tensor) else outputs.logits
    return logits


LLAMA = {**WIDE, "num_key_value_heads": 2, "num_labels": CLASSES, "pad_token_id": 0}
VISION = {**TEXT, "intermediate_size": 64, "image_size": 32, "patch_size": 8}
del VISION["vocab_size"]
SPEECH = {
    "d_model": 32,
    "encoder_layers": 2,
    "encoder_attention_heads": 2,
    "encoder_ffn_dim": 64,
    "num_mel_bins": 8,
    "decoder_attention_heads": 2,
}

# By name: how it is built, how it is called, and the shape of a sample; an empty one means tokens
MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[..., Tensor], tuple[int, ...]]] = {
    "BERT": (transformers("BertConfig", "BertForSequenceClassification", **WIDE), text, ()),
    "RoBERTa": (transformers("RobertaConfig", "RobertaForSequenceClassification", **WIDE), text, ()),
    "DistilBERT": (
        transformers("DistilBertConfig", "DistilBertForSequenceClassification", vocab_size=WORDS, dim=32, n_layers=2,
                     n_heads=2, hidden_dim=64), text, (),
    ),
    "ELECTRA": (transformers("ElectraConfig", "ElectraForSequenceClassification", **WIDE), text, ()),
    "GPT-2": (
        transformers("GPT2Config", "GPT2ForSequenceClassification", vocab_size=WORDS, n_embd=32, n_layer=2, n_head=2,
                     pad_token_id=0), text, (),
    ),
    "Llama": (transformers("LlamaConfig", "LlamaForSequenceClassification", **LLAMA), text, ()),
    "Qwen2": (transformers("Qwen2Config", "Qwen2ForSequenceClassification", **LLAMA), text, ()),
    "T5": (
        transformers("T5Config", "T5ForConditionalGeneration", vocab_size=WORDS, d_model=32, d_kv=16, d_ff=64,
                     num_layers=2, num_heads=2), translated, (),
    ),
    "Whisper's encoder": (
        lambda: transformers("WhisperConfig", "WhisperModel", **SPEECH)().get_submodule("encoder"), speech, (8, 3000),
    ),
    "ViT": (transformers("ViTConfig", "ViTForImageClassification", **VISION), image, (3, 32, 32)),
    "CLIP's vision": (transformers("CLIPVisionConfig", "CLIPVisionModel", **VISION), pooled, (3, 32, 32)),
    "timm resnet18": (timm("resnet18", drop_path_rate=0.1), image, (3, 128, 128)),
    "timm resnetv2_50": (timm("resnetv2_50", drop_path_rate=0.1), image, (3, 128, 128)),
    "timm convnext_atto": (timm("convnext_atto", drop_path_rate=0.1), image, (3, 64, 64)),
    "timm efficientnet_b0": (timm("efficientnet_b0", drop_path_rate=0.1), image, (3, 128, 128)),
    "timm vit_tiny": (timm("vit_tiny_patch16_224", img_size=64, drop_path_rate=0.1), image, (3, 64, 64)),
    "timm swin_tiny": (
        timm("swin_tiny_patch4_window7_224", img_size=64, window_size=4, drop_path_rate=0.1), image, (3, 64, 64),
    ),
    "timm mobilenetv3_small": (timm("mobilenetv3_small_050", drop_path_rate=0.1), image, (3, 128, 128)),
    "timm deit_tiny": (timm("deit_tiny_patch16_224", img_size=64, drop_path_rate=0.1), image, (3, 64, 64)),
    "timm regnety_002": (timm("regnety_002", drop_path_rate=0.1), image, (3, 128, 128)),
    "timm densenet121": (timm("densenet121", drop_rate=0.1), image, (3, 128, 128)),
    "torchvision resnet18": (torchvision("resnet18"), image, (3, 128, 128)),
    "torchvision efficientnet_b0": (torchvision("efficientnet_b0"), image, (3, 128, 128)),
    "torchvision convnext_tiny": (torchvision("convnext_tiny"), image, (3, 64, 64)),
    "torchvision swin_t": (torchvision("swin_t"), image, (3, 64, 64)),
}  # fmt: skip


@dataclass(frozen=True)
class Settings(TrainingSettings):
    batch_size: int = 12
    epochs: int = 1
    precision: str = setting("float32", choices=("float32",))
    model: str = setting("BERT", choices=tuple(MODELS))


class Classified(Recipe):
    """Random samples of four classes."""

    settings: Settings

    def data(self, split: str) -> tuple[Tensor, Tensor]:
        draws = torch.Generator().manual_seed(len(split))
        shape, count = MODELS[self.settings.model][2], SAMPLES if split == "train" else 12
        samples = torch.randn(count, *shape, generator=draws) if shape else self.tokens(count, draws)
        return samples, torch.randint(CLASSES, (count,), generator=draws)

    def tokens(self, count: int, draws: torch.Generator) -> Tensor:
        return torch.randint(1, WORDS, (count, LENGTH), generator=draws)

    def model(self) -> nn.Module:
        return MODELS[self.settings.model][0]()

    def forward(self, model: nn.Module, batch: Any) -> Tensor:
        return MODELS[self.settings.model][1](model, batch)

    def measure(self, outputs: Tensor, batch: Any) -> Measures:
        return {"loss": F.cross_entropy(outputs, batch[1], reduction="none")}

    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        """Adam would divide a gradient that is nothing but rounding by its own size."""
        return torch.optim.SGD(model.parameters(), 0.001, momentum=0.9, fused=True)
