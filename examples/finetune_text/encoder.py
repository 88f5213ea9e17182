"""A small encoder with random weights, to try the example with: python -m finetune_text.encoder FOLDER"""

import sys

import torch
from transformers import BertConfig, BertModel


def write(folder: str) -> None:
    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 128}
    BertModel(BertConfig(vocab_size=256, max_position_embeddings=256, **sizes)).save_pretrained(folder)


if __name__ == "__main__":
    write(sys.argv[1])
