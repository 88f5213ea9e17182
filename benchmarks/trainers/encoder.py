"""The folder of weights that the trainings of finetune_text start from."""

from pathlib import Path
from typing import Any

import torch
from transformers import BertConfig, BertModel


def write_encoder(folder: Path, dropout: float) -> None:
    """An encoder of BERT-tiny's size with random weights."""
    torch.manual_seed(0)
    sizes: Any = {"hidden_size": 128, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 512}
    chances: Any = {"hidden_dropout_prob": dropout, "attention_probs_dropout_prob": dropout}
    BertModel(BertConfig(vocab_size=256, max_position_embeddings=256, **sizes, **chances)).save_pretrained(folder)
