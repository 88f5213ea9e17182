"""The options of an export, its ranks' jobs, and their results. No torch."""

import importlib.util
from dataclasses import dataclass
from typing import Any

from flyte_ddp.engine.job import Job, Measured
from flyte_ddp.errors import InputError, not_installed
from flyte_ddp.fields import Settings, setting
from flyte_ddp.model_files.model_metadata import ModelMetadata
from flyte_ddp.recipes.hyperparameters import DATASETS, MODELS

FILES = {"safetensors": "model.safetensors", "pt2": "model.pt2", "onnx": "model.onnx", "pretrained": "pretrained"}
NEEDED: dict[str, tuple[str, ...]] = {
    "safetensors": ("safetensors",),
    "pt2": (),
    "onnx": ("onnx", "onnxruntime", "onnxscript"),
    "pretrained": (),  # the recipe itself imports the library
}


@dataclass(frozen=True)
class ExportOptions(Settings):
    """The options of an export."""

    formats: str = setting(
        "safetensors,pt2,onnx",
        help="some of safetensors (the weights), pt2 (torch.export), onnx, and pretrained (the folder that "
        "save_pretrained of transformers and peft writes), separated by commas.",
    )
    # The losses of two runtimes in float32 differ by about 1e-6; 1e-4 also allows for one borderline sample in 10,000
    tolerance: float = setting(
        1e-4,
        minimum=0,
        below=1,
        help="by how much a measure of an exported file may differ from that of the weights: absolute up to 1, "
        "relative above.",
    )
    # Larger, because torch may compute a training's convolutions on a GPU in TF32
    reported_tolerance: float = setting(
        1e-3,
        minimum=0,
        below=1,
        help="by how much a measure of the weights may differ from the reported one: absolute up to 1, relative above.",
    )
    reported: dict = setting(  # noqa: RUF009 copied
        {},
        help='measures that the training reported, by name, {"accuracy": 0.99}; empty if they are unknown, or in the '
        "metadata of the weights.",
    )
    timeout_seconds: float = setting(
        600.0, minimum=1, maximum=86400, help="how long a single step of the export may take before it counts as hung."
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        unknown = [name for name in self.names if name not in FILES]
        if unknown or not self.names:
            got = unknown[0] if unknown else ""
            raise InputError(f"formats must be some of {', '.join(FILES)}, separated by commas, got {got!r}")
        for name, value in self.reported.items():
            if isinstance(value, bool) or not isinstance(value, (int, float)):
                raise InputError(f"reported must have a number for each measure, got {value!r} for {name!r}")

    @property
    def names(self) -> list[str]:
        return [name for name in dict.fromkeys(map(str.strip, self.formats.split(","))) if name]


@dataclass(frozen=True)
class FolderExport(ExportOptions):
    """The options of an export of a classifier of a folder of images."""

    model: str = setting(
        "auto",
        choices=("auto", *MODELS),
        help="name of the network; flyte_ddp/recipes/models.py has them; auto is as in the metadata of the weights, "
        "else mnist_cnn.",
    )

    @property
    def network(self) -> str:
        """Return the network to take if the weights have no metadata."""
        return "mnist_cnn" if self.model == "auto" else self.model


@dataclass(frozen=True)
class ClassifierExport(FolderExport):
    """The options of an export of a classifier of a built-in dataset."""

    dataset: str = setting(
        "auto",
        choices=DATASETS,
        help="the dataset that the model was trained on; auto is as in the weights' metadata, else as in training.",
    )


def check_formats(options: ExportOptions) -> None:
    """Raise InputError if a library that one of options.formats needs is not installed."""
    for name in options.names:
        missing = [library for library in NEEDED[name] if importlib.util.find_spec(library) is None]
        if missing:
            raise InputError(
                f"the format {name} needs {not_installed(', '.join(missing), 'export')}, or leave {name} out of formats"
            )


@dataclass(frozen=True)
class ExportJob:
    """A model to write to a new folder. The job has the recipe, the data and, as model_path, the weights.

    Attributes:
        settings: the settings of the model's training, as far as they are known; the job's may be defaults.
        reported: measures of the model's training, by name; empty if unknown.
        training: ModelMetadata.training of the model; empty if unknown.
    """

    job: Job
    folder: str
    options: ExportOptions
    settings: dict[str, Any]
    reported: dict[str, float]
    training: dict[str, Any]


@dataclass(frozen=True)
class TensorSpec:
    """An input or output of the network.

    Attributes:
        shape: the sizes; "batch" is any number of samples, and "any" any other number.
    """

    name: str
    shape: tuple[str, ...]
    dtype: str

    def __str__(self) -> str:
        return f"{self.name}: ({', '.join(self.shape)}) {self.dtype}"


@dataclass(frozen=True)
class Written:
    """The facts of a model, and its measures on the test split before it is exported.

    Attributes:
        classes: the share of each class's samples that is predicted correctly; empty if there are no classes.
        samples: what the samples are called, in the plural.
        before: the source of the recipe's own forward; empty if it has none.
        call: the arguments of the network, as source code with the names of the inputs.
    """

    measured: Measured
    classes: dict[str, float]
    metadata: ModelMetadata
    samples: str
    parameters: int
    before: str
    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]
    call: str
