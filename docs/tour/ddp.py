"""Steps 3 to 5: DistributedDataParallel averages the gradients, DistributedSampler deals out the images."""

import torch
from torch import distributed, nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from digits import BATCH_SIZE, EPOCHS, LEARNING_RATE, fingerprint, network, split
from evaluation import evaluate

# The images that each rank takes in a step, and the learning rate
TRAININGS = (BATCH_SIZE // 2, LEARNING_RATE), (BATCH_SIZE, LEARNING_RATE), (BATCH_SIZE, 2 * LEARNING_RATE)


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
    distributed.init_process_group("gloo")
    models, ranks = [], distributed.get_world_size()
    for batch_size, learning_rate in TRAININGS:
        models.append(network())
        steps, loss = train(models[-1], batch_size, learning_rate)
        if distributed.get_rank() == 0:
            print(f"{ranks} x {batch_size} images, rate {learning_rate}: ", end="")
            print(f"{steps} steps, loss {loss:.4f}, weights {fingerprint(models[-1].state_dict())}")
    evaluate(models[0])
    distributed.destroy_process_group()


if __name__ == "__main__":
    main()
