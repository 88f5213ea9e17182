"""Step 1: one process."""

import torch
from torch.nn import functional as F

from digits import BATCH_SIZE, EPOCHS, LEARNING_RATE, network, shuffled, split


def main() -> None:
    model, (images, labels) = network(), split("train")
    for epoch in range(EPOCHS):
        losses = []
        for batch in shuffled(epoch).split(BATCH_SIZE):
            loss = F.cross_entropy(model(images[batch]), labels[batch])
            gradients = torch.autograd.grad(loss, list(model.parameters()))
            for weights, gradient in zip(model.parameters(), gradients, strict=True):
                weights.data -= LEARNING_RATE * gradient
            losses.append(loss.item())
        print(f"epoch {epoch + 1}: {len(losses)} steps, loss {sum(losses) / len(losses):.4f}")

    test_images, test_labels = split("test")
    correct = model(test_images).argmax(1) == test_labels
    print(f"test accuracy {correct.float().mean():.4f} on {len(correct)} images")


if __name__ == "__main__":
    main()
