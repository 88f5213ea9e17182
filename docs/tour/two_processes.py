"""Step 2: two processes, each with half of every batch, which average their gradients."""

import torch
from torch import distributed, nn
from torch.nn import functional as F

from digits import BATCH_SIZE, EPOCHS, LEARNING_RATE, fingerprint, network, shuffled, split


def train(model: nn.Module, epochs: range) -> None:
    rank, world_size = distributed.get_rank(), distributed.get_world_size()
    images, labels = split("train")
    for epoch in epochs:
        losses = []
        for batch in shuffled(epoch).split(BATCH_SIZE):
            mine = batch[rank::world_size]
            loss = F.cross_entropy(model(images[mine]), labels[mine])
            gradients = torch.autograd.grad(loss, list(model.parameters()))
            for weights, gradient in zip(model.parameters(), gradients, strict=True):
                distributed.all_reduce(gradient)  # now it is the sum of all ranks' gradients, on every rank
                weights.data -= LEARNING_RATE * gradient / world_size
            losses.append(loss.detach())
        mean = torch.stack(losses).mean()
        distributed.all_reduce(mean)
        if rank == 0:
            print(f"epoch {epoch + 1}: {len(losses)} steps, loss {mean / world_size:.4f}")


def main() -> None:
    distributed.init_process_group("gloo")  # waits until RANK 0 to WORLD_SIZE - 1 have met
    model = network()
    train(model, range(EPOCHS))
    print(f"rank {distributed.get_rank()} of {distributed.get_world_size()}: weights {fingerprint(model.state_dict())}")
    distributed.destroy_process_group()


if __name__ == "__main__":
    main()
