"""A script with the Hugging Face Trainer, as its users have it."""

import argparse

import torch
from torch.utils.data import Dataset
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments
from transformers.trainer_utils import get_last_checkpoint

parser = argparse.ArgumentParser()
parser.add_argument("--output_dir")
parser.add_argument("--max_steps", type=int, default=20)
parser.add_argument("--save_steps", type=int, default=10)
args = parser.parse_args()


class Text(Dataset):
    def __len__(self):
        return 64

    def __getitem__(self, index):
        ids = torch.arange(index, index + 16) % 64
        return {"input_ids": ids, "labels": ids}


def main():
    given = TrainingArguments(
        args.output_dir, max_steps=args.max_steps, per_device_train_batch_size=4, save_steps=args.save_steps,
        save_total_limit=2, logging_steps=50, report_to=[], use_cpu=not torch.cuda.is_available(),
        disable_tqdm=True,
        seed=3,
    )  # fmt: skip
    model = GPT2LMHeadModel(GPT2Config(vocab_size=64, n_positions=32, n_embd=16, n_layer=1, n_head=2))
    trainer = Trainer(model=model, args=given, train_dataset=Text())
    last = get_last_checkpoint(args.output_dir)
    print("resumes from", last)
    trainer.train(resume_from_checkpoint=last)
    trainer.save_model()


if __name__ == "__main__":
    main()
