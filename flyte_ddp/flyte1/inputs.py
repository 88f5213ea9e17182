"""Readable errors for invalid command-line inputs, and for files that are not models."""

from dataclasses import asdict
from typing import Any

import click
from flytekit.core.data_persistence import FileAccessProvider
from flytekit.interaction.click_types import DirParamType, FileParamType, UnionParamType
from flytekit.types.file import PythonPickledFile

from flyte_ddp.attempt.platform_training import check_classifier
from flyte_ddp.errors import InputError
from flyte_ddp.flyte1.data import get_url
from flyte_ddp.flyte1.flytekit_compat import alternatives
from flyte_ddp.flyte1.platform import is_local
from flyte_ddp.flyte1.prepare import resolve_name
from flyte_ddp.model_files.model_metadata import ModelMetadata, check_is_file, read_metadata
from flyte_ddp.recipes.hyperparameters import Hyperparameters


def explain_missing_paths() -> None:
    """Patch `pyflyte run` to report a missing file or folder that was given for an optional input.

    Without the patch, flytekit tries to convert the path to None, too, and shows a traceback. The patch also raises an
    InputError for an empty path, which flytekit would take for the current folder. A second call changes nothing.
    """
    if getattr(UnionParamType.convert, "explains", False):
        return
    flytekits = UnionParamType.convert

    def convert(self: UnionParamType, value: Any, param: Any, context: Any) -> Any:
        first, *others = alternatives(self)
        is_optional = others == [click.UNPROCESSED]  # which stands for None
        if is_optional and isinstance(first, (DirParamType, FileParamType)) and isinstance(value, str):
            if not value:  # the text of an unset variable, which flytekit takes for the current folder
                raise InputError(
                    f"--{param.name} must be a path or a URL, got '': name one, or leave --{param.name} out"
                )
            return first.convert(value, param, context)
        return flytekits(self, value, param, context)

    convert.explains = True  # type: ignore[attr-defined]
    UnionParamType.convert = convert


def classifier_metadata(model_state: PythonPickledFile | None) -> ModelMetadata | None:
    """Return the metadata of a built-in classifier's weights; None without weights, or if their file has no metadata.

    The file is downloaded if it is in a storage.

    Raises:
        InputError: the file does not exist in a local run, or its metadata are not those of a built-in classifier.
    """
    if model_state is None:
        return None
    path = get_url(model_state)
    if is_local() and not FileAccessProvider.is_remote(path):
        check_is_file(path)
    known = read_metadata(model_state.download())
    if known:
        check_classifier(known, path)
    return known


def merge_settings(known: ModelMetadata | None, asked: Hyperparameters) -> Hyperparameters:
    """Combine the settings that the weights were trained with and those that the user asks for.

    A setting of `asked` counts if it differs from its default. All others are those of the weights' training.

    Args:
        known: the weights' metadata. If it is None, `asked` is returned unchanged.
        asked: the settings that the user asks for.

    Raises:
        InputError: This version does not know the settings in the metadata, or the combination breaks a rule.
    """
    if known is None:
        return asked
    defaults = asdict(type(asked)())
    own = {name: value for name, value in asdict(asked).items() if value != defaults[name]}
    return Hyperparameters.from_dict({**known.settings, **own})


def choose_dataset(known: ModelMetadata | None, asked: str, remedy: str) -> str:
    """Return the name of the built-in dataset to use with some weights.

    A local run first deletes a damaged copy of the dataset, and drops cache entries whose files are gone.

    Args:
        known: the weights' metadata; None without weights or metadata.
        asked: the dataset that the user asks for, or "auto".
        remedy: what the user can do instead, for the end of the error's message.

    Returns:
        `asked`, unless that is "auto". For "auto", the dataset that the weights were trained on or, without metadata,
        "mnist". A local run prepares mnist then; if the download fails, the name is "digits".

    Raises:
        InputError: The weights were trained on a folder of images.
    """
    if known and known.settings.get("dataset") == "image_folder":
        raise InputError(
            f"model_state must be of a built-in dataset, but {known.data['name']} is a folder of images: {remedy}"
        )
    return resolve_name(known.data["name"] if known and asked == "auto" else asked)


def check_dataset(known: ModelMetadata | None, asked: str) -> None:
    """Raise InputError if the user names another dataset than the one that the weights were trained on.

    Args:
        known: the weights' metadata; with None, nothing is checked.
        asked: the name, or "auto", which is always accepted.
    """
    if known and asked not in ("auto", known.data["name"]):  # images would be normalised as in the other dataset
        raise InputError(
            f"dataset must be the one that model_state was trained on, {known.data['name']}, got {asked}: leave it out"
        )
