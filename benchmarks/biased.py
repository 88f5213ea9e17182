"""Networks with biases whose gradients cancel between samples, where sums of whole numbers could lose their digits.

A bias before batch norm, or of attention's keys, changes no output: its gradient is a sum of addends that are not 0 and
that cancel. `benchmarks.same_bits --costs` counts how many steps are added up again for them.
"""

import torch
from segmentation.recipe import Segmentation
from torch import Tensor, nn

from benchmarks.beside_bare import CLASSES, LENGTH, WORDS, Classifier


class BiasedUNet(Segmentation):
    """The U-Net of examples/segmentation, whose convolutions have biases before batch norm."""

    def model(self) -> nn.Module:
        network: nn.Module = super().model()
        for layer in network.modules():
            if isinstance(layer, nn.Conv2d) and layer.bias is None:
                layer.bias = nn.Parameter(torch.zeros(layer.out_channels))
        return network


class Bert(Classifier):
    """A small BERT of transformers, whose keys have biases of their own."""

    def model(self) -> nn.Module:
        from transformers import BertConfig, BertForSequenceClassification  # which takes seconds to import

        config = BertConfig(
            vocab_size=WORDS, hidden_size=64, num_hidden_layers=2, num_attention_heads=2, intermediate_size=128,
            max_position_embeddings=LENGTH,
        )  # fmt: skip
        config.num_labels = CLASSES
        network: nn.Module = BertForSequenceClassification(config)
        return network

    def forward(self, model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        logits: Tensor = model(batch[0]).logits
        return logits
