"""Steps whose gradients leap above those before: their updates are left out, if settings.skip_spikes asks for it."""

import torch
from torch import Tensor

FIRST = 64  # norms before the first that is judged
WINDOW = 128  # norms that the running mean goes back to, about
LEAST_DEVIATION = 0.01  # of the mean: among norms that are nearly equal, rounding would be a spike


class Spikes:
    """The running mean and deviation of the gradient's norm. They are on the device, so the host does not wait.

    OLMo-core's SkipStepOptimizer judges a step by mean and deviation of the 128 before; here they are moving averages,
    which are three numbers in a checkpoint. Every rank has the same norms, and so the same judgement.
    """

    def __init__(self, deviations: float, device: torch.device):
        """Start without any norm; one that is so many standard deviations above the mean will be a spike."""
        self._deviations = deviations
        # How many norms there were, their mean and their variance, and how many norms were spikes
        self.values = torch.zeros(4, dtype=torch.float64, device=device)

    def judge(self, norm: Tensor) -> Tensor:
        """Return whether the norm of a step's gradients is a spike, () bool, and add the norm to the running mean.

        A spike is more than `deviations` (of __init__) standard deviations above the mean of the norms before. The mean
        then counts this limit in place of the spike. The first FIRST norms are never spikes. The host does not wait for
        the device.

        Args:
            norm: (), the norm of all gradients together, before clipping.
        """
        count, mean, variance, spikes = self.values
        value = norm.double()
        deviation = torch.maximum(variance.sqrt(), LEAST_DEVIATION * mean)
        bound = mean + self._deviations * deviation
        is_spike = (count >= FIRST) & (value > bound)
        # The plain mean of the first norms; later each counts for 1 / WINDOW. A spike counts as the bound. If it did
        # not count, norms that stay higher would be spikes to the end, and the weights would never change again
        share = 1 / (count + 1).clamp(max=WINDOW)
        difference = torch.where(is_spike, bound, value) - mean
        now = (
            count + 1,
            mean + share * difference,
            (1 - share) * (variance + share * difference.square()),
            spikes + is_spike,
        )
        self.values.copy_(torch.stack(now))
        return is_spike

    def count(self) -> int:
        """Return how many updates were left out so far; the host waits for the device."""
        return int(self.values[3])
