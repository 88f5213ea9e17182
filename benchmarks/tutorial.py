"""The training of the tutorial 'Single Node, Multi GPU Training', on GPUs or CPU ranks, to compare with.

Its network, transforms per sample, DataLoader, DistributedSampler without set_epoch, batch of 128 per rank, SGD
0.01/0.5 and evaluation by rank 0 alone are kept. The code is rewritten; changed are gloo ranks if there is no GPU, and
a file for the rendezvous instead of port 8888.
"""

import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from torch import distributed, nn
from torch.multiprocessing.spawn import spawn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler

from flyte_ddp.launch.environment import available_cores

BATCH_SIZE, TEST_BATCH_SIZE, LEARNING_RATE, MOMENTUM, SEED = 128, 1000, 0.01, 0.5, 1


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(1, 20, 5, 1)
        self.conv2 = nn.Conv2d(20, 50, 5, 1)
        self.fc1 = nn.Linear(4 * 4 * 50, 500)
        self.fc2 = nn.Linear(500, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = F.max_pool2d(F.relu(self.conv1(x)), 2, 2)
        x = F.max_pool2d(F.relu(self.conv2(x)), 2, 2)
        x = F.relu(self.fc1(x.view(-1, 4 * 4 * 50)))
        return F.log_softmax(self.fc2(x), dim=1)


def loaders(root: str, rank: int, world_size: int) -> tuple[DataLoader, DataLoader]:
    from torchvision import datasets, transforms

    transform = transforms.Compose([transforms.ToTensor(), transforms.Normalize((0.1307,), (0.3081,))])
    train = datasets.MNIST(root, train=True, transform=transform)
    sampler: Any = DistributedSampler(train, num_replicas=world_size, rank=rank)
    test = datasets.MNIST(root, train=False, transform=transform)
    pin = torch.cuda.is_available()
    return DataLoader(train, BATCH_SIZE, sampler=sampler, pin_memory=pin), DataLoader(test, TEST_BATCH_SIZE)


def rank_main(rank: int, world_size: int, root: str, epochs: int, place: str) -> None:
    torch.manual_seed(SEED)
    torch.set_num_threads(max(1, available_cores() // world_size))
    device = torch.device("cuda", rank) if torch.cuda.is_available() else torch.device("cpu")
    backend = "nccl" if device.type == "cuda" else "gloo"
    distributed.init_process_group(backend, init_method=f"file://{place}/store", rank=rank, world_size=world_size)
    model = DistributedDataParallel(Net().to(device), device_ids=[rank] if device.type == "cuda" else None)
    optimizer = torch.optim.SGD(model.parameters(), lr=LEARNING_RATE, momentum=MOMENTUM)
    train, test = loaders(root, rank, world_size)
    results: list[dict[str, float]] = []
    for _ in range(epochs):
        started = time.perf_counter()
        model.train()
        for images, labels in train:
            optimizer.zero_grad()
            F.nll_loss(model(images.to(device)), labels.to(device)).backward()
            optimizer.step()
        if device.type == "cuda":
            torch.cuda.synchronize()
        seconds = time.perf_counter() - started
        if rank == 0:
            model.eval()
            with torch.no_grad():
                guesses = ((model(images.to(device)).argmax(1).cpu(), labels) for images, labels in test)
                correct = sum(int((guessed == labels).sum()) for guessed, labels in guesses)
            results.append({"seconds": seconds, "accuracy": correct / 10_000})
            torch.save(results, f"{place}/results")
    distributed.destroy_process_group()


def train_tutorial(root: Path, epochs: int, world_size: int) -> list[dict[str, float]]:
    """Seconds of training and accuracy on the test images, for each epoch. root is laid out as torchvision wants it."""
    with tempfile.TemporaryDirectory() as place:
        spawn(rank_main, args=(world_size, str(root), epochs, place), nprocs=world_size)
        results: list[dict[str, float]] = torch.load(f"{place}/results")
        return results


if __name__ == "__main__":
    print(train_tutorial(Path(sys.argv[1]), int(sys.argv[2]), 2))
