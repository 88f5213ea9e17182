"""Metadata of a weights file, from which its network can be rebuilt. Imports no torch.

It is in model.json beside model.pt, or in the header of a safetensors file.
"""

import json
import pkgutil
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Dict, Optional, Union

from flyte_ddp.errors import InputError
from flyte_ddp.settings import Settings
from flyte_ddp.storage import write_whole

FORMAT = 1
HEADER = "flyte_ddp"  # the metadata's entry in the header of a safetensors file
NO_SAFETENSORS = 'safetensors is not installed: pip install "flyte-ddp-training[export]", or load a .pt file'


@dataclass(frozen=True)
class ModelMetadata:
    """Metadata of a trained network.

    Attributes:
        recipe: "package.module:Name" of the recipe that trained it.
        settings_class: "package.module:Name" of the class of the settings.
        data: the name of the data, and their digest if a file or folder was given.
        facts: what Recipe.facts returned.
        headline: the name of its main measure.
        measures: on the test split, as the training reported them, by name.
        training: world_size, hardware and precision.
        versions: of Python and torch.
    """

    recipe: str
    settings_class: str
    settings: Dict[str, Any]
    data: Dict[str, str]
    facts: Dict[str, Any]
    headline: str
    measures: Dict[str, float]
    training: Dict[str, Any]
    versions: Dict[str, str]
    format: int = FORMAT

    def as_json(self) -> str:
        return json.dumps(asdict(self), indent=2, default=str)  # a recipe's facts may be anything

    def load_settings(self) -> Settings:
        """The settings of the training; imports the module of their class."""
        kind = pkgutil.resolve_name(self.settings_class)
        if not (isinstance(kind, type) and issubclass(kind, Settings)):
            raise InputError(f"settings_class must name a class of settings, got {self.settings_class}")
        return kind.from_dict(self.settings)


def path_beside(weights: Union[str, Path]) -> Path:
    return Path(weights).with_suffix(".json")


def read_metadata(weights: Union[str, Path]) -> Optional[ModelMetadata]:
    """The metadata of a weights file; None if it has none."""
    beside = path_beside(weights)
    if Path(weights).is_file() and is_safetensors(weights):
        text = _header(weights)
    else:
        text = beside.read_text(encoding="utf-8") if beside.is_file() else ""
    try:
        return ModelMetadata(**_of_our_format(json.loads(text)))
    except (ValueError, TypeError):  # not written by us
        return None


def is_safetensors(weights: Union[str, Path]) -> bool:
    """Whether it is a safetensors file, by its content: eight bytes with a length, then JSON. Raises OSError."""
    with open(weights, "rb") as file:
        return file.read(9)[8:] == b"{"


def write_metadata(weights: Path, metadata: ModelMetadata) -> None:
    """Raises OSError."""
    write_whole(path_beside(weights), metadata.as_json().encode())


def needs_metadata(weights: Union[str, Path], remedy: str) -> ModelMetadata:
    """The metadata of a weights file; InputError if it has none."""
    metadata = read_metadata(weights)
    if metadata is None:
        raise InputError(f"{weights} has no {path_beside(weights).name} beside it, which training writes: {remedy}")
    return metadata


def _of_our_format(content: Any) -> Dict[str, Any]:
    if not isinstance(content, dict) or content.get("format") != FORMAT:
        raise ValueError
    return {name: value for name, value in content.items() if name in ModelMetadata.__dataclass_fields__}


def _header(path: Union[str, Path]) -> str:
    try:
        from safetensors import SafetensorError, safe_open
    except ImportError:
        raise InputError(NO_SAFETENSORS) from None
    try:
        with safe_open(path, framework="numpy") as file:
            return str((file.metadata() or {}).get(HEADER, ""))
    except SafetensorError:  # damaged; loading the weights reports it
        return ""
