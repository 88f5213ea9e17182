"""The inputs and results of the loading study. Standard library only."""

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

from flyte_ddp.fields import Settings, setting


@dataclass(frozen=True)
class LoadingSettings(Settings):
    """What the loading study tries.

    Attributes:
        passes: over the images, for each setting.
        most_images: per pass; in a larger folder each pass takes different ones.
        most_workers: 0, 1, 2, 4 and so on up to this many are tried; 0 is twice the cores, at most 16.
        batch_size: images of one batch.
    """

    passes: int = setting(5, minimum=2, maximum=100)
    most_images: int = setting(4096, minimum=1)
    most_workers: int = setting(0, minimum=0, maximum=64)
    batch_size: int = setting(128, minimum=1)


@dataclass(frozen=True)
class LoadingJob:
    """data: folder of the dataset, with its access."""

    data: str
    settings: LoadingSettings


@dataclass(frozen=True)
class TimedSetting:
    """One setting's passes: seconds of each, over `images` images, from the start of the workers to their end."""

    workers: int
    pin_memory: bool
    images: int
    seconds: list[float]

    @property
    def memory(self) -> str:
        return "pinned" if self.pin_memory else "pageable"

    @property
    def rates(self) -> list[float]:
        """Images per second, of each pass."""
        return [self.images / seconds for seconds in self.seconds]

    @property
    def rate(self) -> float:
        return median(self.rates)


@dataclass(frozen=True)
class LoadingTimes:
    """peak_bytes: peak memory of the rank or of any one of its workers."""

    settings: list[TimedSetting]
    device: str
    peak_bytes: int


def recommended(timed: Sequence[TimedSetting]) -> TimedSetting:
    """The fewest workers, and pageable memory, whose median is within the range of the fastest setting's passes."""
    fastest = max(timed, key=lambda one: one.rate)
    as_good = [one for one in timed if one.rate >= min(fastest.rates)]
    return min(as_good, key=lambda one: (one.workers, one.pin_memory))
