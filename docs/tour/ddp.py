"""Steps 3 and 4: DistributedDataParallel averages the gradients, DistributedSampler deals out the images."""

import argparse

import torch
from torch import distributed, nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from digits import BATCH_SIZE, EPOCHS, LEARNING_RATE, fingerprint, network, split


def train(model: nn.Module, batch_size: int, learning_rate: float) -> tuple[int, float]:
    """Steps and mean loss of the last epoch; batch_size is that of each rank."""
    parallel = DistributedDataParallel(model)  # every rank now has the weights of rank 0
    optimizer = torch.optim.SGD(model.parameters(), learning_rate)
    dataset = TensorDataset(*split("train"))
    sampler: DistributedSampler = DistributedSampler(dataset)
    loader = DataLoader(dataset, batch_size, sampler=sampler)
    for epoch in range(EPOCHS):
        sampler.set_epoch(epoch)  # without it, every epoch has the same order
        losses = []
        for images, labels in loader:
            optimizer.zero_grad()
            loss = F.cross_entropy(parallel(images), labels)
            loss.backward()  # averages the gradients of all ranks on the way
            optimizer.step()
            losses.append(loss.detach())
    mean = torch.stack(losses).mean()
    distributed.all_reduce(mean)
    return len(losses), mean.item() / distributed.get_world_size()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--batch-size", type=int, default=BATCH_SIZE // 2, help="images of a step, of each rank")
    parser.add_argument("--learning-rate", type=float, nargs="+", default=[LEARNING_RATE], help="one training for each")
    arguments = parser.parse_args()
    distributed.init_process_group("gloo")
    for learning_rate in arguments.learning_rate:
        model, ranks = network(), distributed.get_world_size()
        steps, loss = train(model, arguments.batch_size, learning_rate)
        if distributed.get_rank() == 0:
            print(f"{ranks} x {arguments.batch_size} images, rate {learning_rate}: ", end="")
            print(f"{steps} steps, loss {loss:.4f}, weights {fingerprint(model.state_dict())}")
    distributed.destroy_process_group()


if __name__ == "__main__":
    main()
