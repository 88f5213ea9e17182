"""A network that is little but weights, to see what these cost."""

from torch import nn

from benchmarks.gpu_rows.faulty import FEATURES, Faulty


class Wide(Faulty):
    """100 million parameters on a GPU, of which AdamW makes three times as much."""

    def model(self) -> nn.Module:
        width = 4096 if self.device.type == "cuda" else 256
        layers = [nn.Linear(FEATURES, width), *(nn.Linear(width, width) for _ in range(6)), nn.Linear(width, 2)]
        return nn.Sequential(*layers)
