"""Step 5: two ways to share out the test images, one of which counts some of them twice."""

import torch
from torch import Tensor, distributed, nn
from torch.utils.data import DistributedSampler, TensorDataset

from digits import split


def accuracy(model: nn.Module, mine: list[int]) -> str:
    """Over all ranks, from this rank's indices: sums and counts are added up, and divided once."""
    images, labels = split("test")
    with torch.inference_mode():
        correct = model(images[mine]).argmax(1) == labels[mine]
    counts: Tensor = torch.tensor([int(correct.sum()), len(mine)])
    distributed.all_reduce(counts)
    return f"{counts[0] / counts[1]:.4f} on {counts[1]} images"


def evaluate(model: nn.Module) -> None:
    rank, ranks = distributed.get_rank(), distributed.get_world_size()
    dataset = TensorDataset(*split("test"))
    by_sampler = accuracy(model, list(DistributedSampler(dataset, shuffle=False)))
    by_slices = accuracy(model, list(range(rank, len(dataset), ranks)))
    if rank == 0:
        print(f"DistributedSampler: {by_sampler}")
        print(f"slices:             {by_slices}")
