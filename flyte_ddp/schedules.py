"""Learning rate schedules, as factors of the peak rate. Standard library only."""

import math


def one_cycle(step: int, steps: int, warmup_fraction: float = 0.25, start: float = 0.1, end: float = 0.001) -> float:
    """Return the factor of the peak learning rate at a step: linear from start up to 1, then linear down to end.

    Args:
        step: from 0.
        steps: the number of all steps.
        warmup_fraction: the share of all steps in which the factor rises. With 0 the factor begins at 1, whatever start
            is.
        start: the factor at the first step.
        end: the factor that is reached after the last step.
    """
    warmup = warmup_fraction * steps
    if step < warmup:
        return start + (1 - start) * step / warmup
    return 1 + (end - 1) * (min(step, steps) - warmup) / max(1.0, steps - warmup)


def cosine(step: int, steps: int, warmup_fraction: float = 0.05, end: float = 0.0) -> float:
    """Return the factor of the peak learning rate at a step: linear up to 1, then half a cosine down to end.

    Args:
        step: from 0.
        steps: the number of all steps.
        warmup_fraction: the share of all steps in which the factor rises. The first step has a factor above 0. With 0
            the factor begins at 1.
        end: the factor that is reached after the last step.
    """
    warmup = warmup_fraction * steps
    if step < warmup:
        return (step + 1) / (warmup + 1)
    return end + (1 - end) * (1 + math.cos(math.pi * min(1.0, (step - warmup) / max(1.0, steps - warmup)))) / 2
