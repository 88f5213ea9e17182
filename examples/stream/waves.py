"""Waves of 64 values with noise, made a thousand at a time, so that no machine need hold them all."""

from collections.abc import Iterator

import numpy as np


def waves(thousands: int, seed: int) -> Iterator[dict[str, np.ndarray]]:
    numbers = np.random.default_rng(seed)
    time = np.linspace(0, 2 * np.pi, 64, dtype=np.float32)
    for _ in range(thousands):
        frequency = numbers.uniform(1, 3, 1000).astype(np.float32)
        noise = numbers.normal(0, 0.1, (1000, 64)).astype(np.float32)
        yield {"wave": np.sin(frequency[:, None] * time) + noise, "frequency": frequency}
