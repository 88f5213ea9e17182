"""Metadata in a weights file, from which its network can be rebuilt. Imports no torch.

In a file of torch.save, the metadata is one more entry in the zip archive, which torch.load ignores. In a safetensors
file it is in the header.
"""

import hashlib
import json
import math
import pkgutil
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO, Any, TypeVar, get_origin, get_type_hints
from zipfile import ZIP_STORED, ZipFile, ZipInfo, is_zipfile

from flyte_ddp.errors import InputError
from flyte_ddp.fields import Settings, plain

FORMAT = 1
HEADER = "flyte_ddp"  # the metadata's entry in the header of a safetensors file
ENTRY = "flyte_ddp.json"  # the metadata's entry in a zip archive
MEASURED_ON = "measured_on"  # in ModelMetadata.training: the split of the measures, if that is not the test split
MOST_BYTES = 2**20  # the limit of an entry; ours have a few thousand
MOST_HEADER_BYTES = 10**8  # the limit of safetensors itself
Kind = TypeVar("Kind")


@dataclass(frozen=True)
class ModelMetadata:
    """Metadata of a trained network.

    Attributes:
        recipe: "package.module:Name" of the recipe that trained the network.
        settings_class: "package.module:Name" of the class of the settings.
        settings: the settings of the training, by name.
        data: the name of the data, and their digest if a file or folder was given.
        facts: what Recipe.facts returned.
        headline: the name of the main measure.
        measures: measures by name on the test split, or for last.pt and the files of keep_best on the validation split,
            as the training reported them.
        training: world_size, hardware and precision; measured_on, if the measures are not of the test split.
        versions: the versions of Python and torch.
        base_digest: the digest of the FrozenBase; empty if the file has all weights.
        weights_digest: the digest of the weights that the training reported, by flyte_ddp.engine.digest.
    """

    recipe: str
    settings_class: str
    settings: dict[str, Any]
    data: dict[str, str]
    facts: dict[str, Any]
    headline: str
    measures: dict[str, float]
    training: dict[str, Any]
    versions: dict[str, str]
    base_digest: str = ""
    weights_digest: str = ""
    format: int = FORMAT

    def as_json(self) -> str:
        return json.dumps(plain(asdict(self)), indent=2, default=str)  # a recipe's facts may have any type

    @property
    def digest(self) -> str:
        """Return the digest of these metadata, which copies of a file share. An export writes metadata of its own."""
        return hashlib.sha256(self.as_json().encode()).hexdigest()

    @property
    def tested(self) -> dict[str, float]:
        """Return the measures on the test split; an empty dict if these are of another one."""
        return {} if MEASURED_ON in self.training else self.measures

    def load_settings(self, path: str | Path) -> Settings:
        """Return the settings of the training, after importing the module of their class.

        Args:
            path: the file of these weights, for messages.

        Raises:
            InputError: the class cannot be imported, or no longer takes these settings.
        """
        kind = import_class(self.settings_class, Settings, f"{path}: the class of the settings")
        try:
            return kind.from_dict(self.settings)
        except InputError as error:
            raise InputError(
                f"{path} is of other settings than there are now, load it with that code: {error}"
            ) from None


def import_class(name: str, base: type[Kind], what: str) -> type[Kind]:
    """Import the module of a class, and return the class.

    Args:
        name: the class as "package.module:Name".
        base: the class that it must be derived from, or be.
        what: what the message calls the class.

    Raises:
        InputError: there is no such module or class, or the class is not derived from base.
        Exception: whatever the module raises while it is imported, except an ImportError, AttributeError or ValueError,
            which become an InputError.
    """
    try:
        kind = pkgutil.resolve_name(name)
    except (ImportError, AttributeError, ValueError) as error:
        raise InputError(
            f"{what}, {name}, cannot be imported ({type(error).__name__}: {error}): start Python in the folder from "
            "which its module can be imported, or put that folder on PYTHONPATH"
        ) from error
    if not (isinstance(kind, type) and issubclass(kind, base)):
        raise InputError(f"{what} must be derived from {base.__name__}, got {name}")
    return kind


def read_metadata(weights: str | Path) -> ModelMetadata | None:
    """Return the metadata in a file of weights, in the format of torch.save or safetensors; None if there are none.

    The result is also None if the metadata are of another format than this version's, or if the file is damaged or not
    there. Nothing is raised.
    """
    try:
        text = _header(weights) if is_safetensors(weights) else _entry(weights)
        return ModelMetadata(**_of_our_format(json.loads(text)))
    except Exception:  # a damaged file makes zipfile and json raise a dozen types
        return None


def is_safetensors(weights: str | Path) -> bool:
    """Return whether a file's content is safetensors: eight bytes with a length, then JSON. Raises OSError."""
    with open(weights, "rb") as file:
        return file.read(9)[8:] == b"{"


def add_metadata(weights: Path | IO[bytes], metadata: ModelMetadata) -> None:
    """Add metadata to a file of torch.save that has none."""
    with ZipFile(weights, "a") as archive:
        folder = archive.namelist()[0].partition("/")[0]  # all of torch's entries are in one folder
        # Without a date, equal trainings write equal files
        archive.writestr(ZipInfo(f"{folder}/{ENTRY}"), metadata.as_json())


def plain_remedy(weights: str | Path) -> str:
    """Return how to load weights without metadata, for an error."""
    read = "safetensors.torch.load_file(path)" if is_safetensors(weights) else "torch.load(path, weights_only=True)"
    return f"load a network of your own by model.load_state_dict({read})"


def read_required_metadata(weights: str | Path, remedy: str) -> ModelMetadata:
    """Return the metadata in a file of weights, in the format of torch.save or safetensors.

    Args:
        weights: the file.
        remedy: what the message tells users of a recipe to do if the file has no metadata.

    Raises:
        InputError: the file has no metadata of this version's format, is no file of weights, or is not there.
    """
    check_is_file(weights)
    metadata = read_metadata(weights)
    if metadata is None and not is_safetensors(weights) and not is_zipfile(weights):
        raise InputError(f"{weights} must be a file of weights, and is none, or is damaged: copy it again")
    if metadata is None:
        raise InputError(
            f"{weights} must have the metadata that a recipe's training writes, and is a plain state_dict, as your own "
            f"loop leaves it: {plain_remedy(weights)}; for a recipe, {remedy}"
        )
    return metadata


def check_is_file(weights: str | Path) -> None:
    """Raise InputError for a place without a file."""
    if not Path(weights).is_file():
        raise InputError(f"model_state must be a file, and {weights} is none: give the one of a training")


def _of_our_format(content: Any) -> dict[str, Any]:
    if not isinstance(content, dict) or content.get("format") != FORMAT:
        raise ValueError
    kinds = {name: get_origin(kind) or kind for name, kind in get_type_hints(ModelMetadata).items()}
    known = {name: value for name, value in content.items() if name in kinds}
    if isinstance(measures := known.get("measures"), dict):  # fields.plain writes NaN as null
        known["measures"] = {name: math.nan if value is None else value for name, value in measures.items()}
    if not all(isinstance(value, kinds[name]) for name, value in known.items()):
        raise ValueError
    return known


def _entry(path: str | Path) -> str:
    with ZipFile(path) as archive:
        (entry,) = (entry for entry in archive.infolist() if entry.filename.endswith(f"/{ENTRY}"))
        if entry.compress_type != ZIP_STORED or entry.file_size > MOST_BYTES:  # such an entry could fill the memory
            raise ValueError
        return archive.read(entry).decode()


def _header(path: str | Path) -> str:
    with open(path, "rb") as file:
        size = int.from_bytes(file.read(8), "little")
        if size > MOST_HEADER_BYTES:
            raise ValueError
        return str(json.loads(file.read(size))["__metadata__"][HEADER])
