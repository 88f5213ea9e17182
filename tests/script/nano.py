"""A training script as nanoGPT's: it knows torchrun, and nothing of this package."""

import argparse
import os

import torch
from torch import nn
from torch.distributed import destroy_process_group, init_process_group
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel as DDP

parser = argparse.ArgumentParser()
parser.add_argument("--out_dir", default="out")
parser.add_argument("--max_iters", type=int, default=60)
parser.add_argument("--eval_interval", type=int, default=10)
parser.add_argument("--learning-rate", type=float, default=1e-2)
args = parser.parse_args()

init_process_group(backend="gloo")
rank = int(os.environ["RANK"])
master_process = rank == 0
if master_process:
    os.makedirs(args.out_dir, exist_ok=True)

text = torch.tensor(list(b"to be, or not to be, that is the question: " * 20))


def get_batch(iter_num):
    torch.manual_seed(1337 + 1000 * rank + iter_num)
    ix = torch.randint(len(text) - 9, (8,))
    return torch.stack([text[i : i + 8] for i in ix]), torch.stack([text[i + 1 : i + 9] for i in ix])


torch.manual_seed(1337)
model = nn.Sequential(nn.Embedding(128, 16), nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 128))
optimizer = torch.optim.AdamW(model.parameters(), lr=args.learning_rate)
iter_num = 0
path = os.path.join(args.out_dir, "ckpt.pt")
if os.path.exists(path):
    checkpoint = torch.load(path)
    model.load_state_dict(checkpoint["model"])
    optimizer.load_state_dict(checkpoint["optimizer"])
    iter_num = checkpoint["iter_num"]
    if master_process:
        print(f"Resuming training from iter {iter_num}")
ddp_model = DDP(model)

while iter_num < args.max_iters:
    X, Y = get_batch(iter_num)
    loss = F.cross_entropy(ddp_model(X).view(-1, 128), Y.view(-1))
    optimizer.zero_grad(set_to_none=True)
    loss.backward()
    optimizer.step()
    iter_num += 1
    if iter_num % args.eval_interval == 0 and master_process:
        print(f"iter {iter_num}: loss {loss.item():.4f}")
        state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "iter_num": iter_num}
        torch.save(state, path)
destroy_process_group()
