"""How measures are named and formatted."""

import math
from collections.abc import Container, Sequence

from flyte_ddp.events import RunStarted


def in_words(name: str) -> str:
    """top5_accuracy becomes top5 accuracy."""
    return name.replace("_", " ")


def capitalised(text: str) -> str:
    """Changes only the first letter, so that BLEU stays BLEU."""
    return text[:1].upper() + text[1:]


def split_sizes(run: RunStarted) -> str:
    """How many samples each split has."""
    counts = [f"{run.train_samples:,} training" if run.train_samples else "an unknown number of training"]
    if run.validation_samples:
        counts.append(f"{run.validation_samples:,} validation")
    if run.test_samples:
        counts.append(f"{run.test_samples:,} test")
    return " and ".join([", ".join(counts[:-1]), counts[-1]] if counts[1:] else counts) + f" {run.samples}"


def multiples(names: Sequence[str]) -> str:
    """Each distinct name once, with its number: 2 x H100."""
    return ", ".join(f"{names.count(name)} x {name}" for name in dict.fromkeys(names))


def written(name: str, value: float, percent: Container[str], decimals: int = 4) -> str:
    """A measure's value: in per cent if named so, the loss with a fixed number of decimals, others with four digits.

    decimals counts those of the value itself: 4 are 2 decimals of a percentage.
    """
    if not math.isfinite(value):
        return str(value)
    if name in percent:
        return f"{value:.{decimals - 2}%}"
    return f"{value:.{decimals}f}" if name == "loss" else f"{value:.4g}"


def duration(seconds: float) -> str:
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, seconds = divmod(round(seconds), 60)
    return f"{minutes} min {seconds} s" if minutes < 60 else f"{minutes // 60} h {minutes % 60} min"


def time_left(run: RunStarted, seconds: float | None) -> str:
    """Of a training that has so many seconds to go; empty if that is unknown, or next to nothing."""
    if seconds is None or seconds < 1:
        return ""
    return f"{'at most ' * run.may_end_early}{duration(seconds)} left"
