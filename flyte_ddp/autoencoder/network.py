"""The autoencoder's network, without Lightning."""

from pathlib import Path

from torch import Tensor, nn

from flyte_ddp.model_files.weights import load_weights

PIXELS, HIDDEN, CODE = 28 * 28, 64, 3


class Autoencoder(nn.Module):
    """784-64-3-64-784, the autoencoder of Lightning's introduction: images (N, 1, 28, 28) from 0 to 1 to (N, 784)."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Sequential(nn.Flatten(), nn.Linear(PIXELS, HIDDEN), nn.ReLU(), nn.Linear(HIDDEN, CODE))
        self.decoder = nn.Sequential(nn.Linear(CODE, HIDDEN), nn.ReLU(), nn.Linear(HIDDEN, PIXELS))

    def forward(self, images: Tensor) -> Tensor:
        return self.decoder(self.encoder(images))


def load_autoencoder(path: str | Path) -> Autoencoder:
    """The trained network from a model_state file, in evaluation mode on the CPU; nothing in the file is executed."""
    return load_weights(Autoencoder(), path).eval()
