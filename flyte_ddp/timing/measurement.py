"""The inputs and measurements of the timing study of inference. No torch."""

from dataclasses import dataclass
from typing import NamedTuple

from flyte_ddp.errors import InputError
from flyte_ddp.fields import Settings, setting
from flyte_ddp.recipes.hyperparameters import DATASETS, MODELS

ONE_DEVICE, DATA_PARALLEL, PROCESSES = "one device", "nn.DataParallel", "one process per device"
METHODS = (ONE_DEVICE, DATA_PARALLEL, PROCESSES)
MOST_IMAGES = 100_000  # per batch: far more than any device benefits from


@dataclass(frozen=True)
class TimingOptions(Settings):
    """What to time, and how often.

    Attributes:
        model: name of the network, which keeps its initial weights: they do not affect its speed.
        dataset: whose test images are predicted; auto as in training.
        device_batch_sizes: numbers of images that each device gets at a time, separated by commas.
        nproc: processes of the third method; 0 is one per visible GPU, or two where there is none.
        repeats: how often everything is measured, each time in new processes.
        seconds: how long one measurement should take.
        timeout_seconds: how long a process may take for one measurement.
    """

    model: str = setting("mnist_cnn", choices=MODELS)
    dataset: str = setting("auto", choices=DATASETS)
    device_batch_sizes: str = setting("1,8,32,128,512")
    nproc: int = setting(0, minimum=0, maximum=1024)
    repeats: int = setting(5, minimum=1, maximum=100)
    seconds: float = setting(0.3, above=0, maximum=60)
    timeout_seconds: float = setting(300.0, minimum=1, maximum=86400)

    def __post_init__(self) -> None:
        super().__post_init__()
        numbers = self.device_batch_sizes.split(",")
        if not all(number.strip().isdecimal() and 1 <= int(number) <= MOST_IMAGES for number in numbers):
            raise InputError(
                f"TimingOptions.device_batch_sizes must be whole numbers from 1 to {MOST_IMAGES:,}, comma-separated, "
                f"got {self.device_batch_sizes!r}"
            )

    @property
    def sizes(self) -> tuple[int, ...]:
        return tuple(sorted({int(number) for number in self.device_batch_sizes.split(",")}))


@dataclass(frozen=True)
class TimingJob:
    """Which methods the ranks of a world measure, on the test images of the prepared dataset in the folder data."""

    data: str
    methods: tuple[str, ...]
    options: TimingOptions


class Measurement(NamedTuple):
    """One measurement of one method.

    Attributes:
        devices: how many worked at the same time; without GPUs, the number of processes.
        threads: torch threads of each process.
        batch_size: images of one forward pass on each device.
        images_per_second: of all devices together.
    """

    method: str
    devices: int
    threads: int
    batch_size: int
    images_per_second: float
