"""The weights in a file, fitted to a network. Nothing in the file is executed."""

from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import IO, Any, TypeVar
from zipfile import is_zipfile

import torch
from torch import Tensor, nn
from torch.utils.serialization import config as serialization_config

from flyte_ddp.errors import InputError, not_installed
from flyte_ddp.model_files.frozen_base import add_module_versions, compute_base_digest, frozen_weights
from flyte_ddp.model_files.model_metadata import is_safetensors, read_metadata
from flyte_ddp.text import listed

REMEDY = "use the model_state of a training of this network, with the settings of that training"
Name = TypeVar("Name")
Network = TypeVar("Network", bound=nn.Module)


def load_weights(model: Network, path: str | Path, called: str = "model_state", remedy: str = REMEDY) -> Network:
    """Load the weights of a file into a network, and return the same network.

    Tied weights may be in the file under one name. If the training left out frozen weights, because model() provides
    them, they must be in the network already, with the values that they had in the training.

    Args:
        model: the network, which is changed. Its mode, device and dtypes stay as they are.
        path: a file of weights, of torch.save or safetensors.
        called: what messages call the file.
        remedy: what messages tell the user to do.

    Raises:
        InputError: the file cannot be read, its weights do not fit the network, or the network's frozen weights are not
            those of the training.
    """
    own = model.state_dict()
    weights = add_frozen_weights(with_tied(read_weights(path, called, remedy), own), model, path, called)
    if names := misfits(weights, own):
        problem = describe_misfits(names, weights, own)
        raise InputError(f"{called} must fit the network, got {path} with {problem}: {remedy}")
    model.load_state_dict(add_module_versions(weights, model))
    return model


def read_weights(path: str | Path, called: str = "model_state", remedy: str = REMEDY) -> dict[str, Tensor]:
    """Read the state dict in a file of weights to the CPU. Nothing in the file is executed.

    Args:
        path: the file, of torch.save or safetensors.
        called: what messages call the file.
        remedy: what the message tells the user to do if the file has no state dict that can be read.

    Raises:
        InputError: the file is missing or damaged, cannot be read safely, or has something other than tensors; or the
            safetensors library is missing.
    """
    try:
        if is_safetensors(path):
            content: Any = _read_safetensors(path)
        else:
            content = torch.load(path, map_location="cpu", weights_only=True)
        problem = f"holds something else ({type(content).__name__})"
    except InputError:  # a library is missing
        raise
    except Exception as error:  # zipfile, pickle, torch and safetensors have many types, and advise to trust the file
        if is_cut_short(path):
            raise InputError(
                f"{called} must be a whole file, but {path} is damaged, or cut short: copy it again"
            ) from None
        content = None
        problem = f"cannot be read safely ({getattr(error, 'strerror', None) or type(error).__name__})"
    if not isinstance(content, dict) or not all(isinstance(value, Tensor) for value in content.values()):
        raise InputError(f"{called} must be a state_dict of tensors, but {path} {problem}: {remedy}")
    return content


def is_cut_short(path: str | Path) -> bool:
    """Return whether a file begins as the zip file that torch writes, but lacks the list of contents at its end."""
    with suppress(OSError), open(path, "rb") as file:
        return file.read(4) == b"PK\x03\x04" and not is_zipfile(path)
    return False


def first_names(weights: Mapping[Name, Tensor]) -> dict[Name, Name]:
    """Return, for each name, the first name of the same tensor: the name itself if the weight is not tied.

    Two names have the same tensor if device, address, dtype, shape and stride are equal. Empty tensors are never tied.
    """
    firsts: dict[Any, Name] = {}
    return {
        name: firsts.setdefault((value.device, value.data_ptr(), value.dtype, value.shape, value.stride()), name)
        if value.numel()
        else name
        for name, value in weights.items()
    }


def copy_to_host(weights: Mapping[Name, Tensor], room: dict[Name, Tensor] | None = None) -> dict[Name, Tensor]:
    """Copy weights to the host's memory, wait until the copies are complete, and return them by name.

    Tied weights share one copy.

    Args:
        weights: the weights by name.
        room: tensors by name, whose memory the copies reuse: pass an empty dict first, and the same dict in later
            calls. This function adds tensors to the dict, and replaces those whose shape or dtype does not fit. The
            next call overwrites the returned copies. Copies of weights on a GPU are page-locked, which makes copying
            about ten times as fast. With None, all copies are new and in ordinary memory.
    """
    firsts = first_names(weights)
    is_kept = room is not None
    room = {} if room is None else room
    for name in {*firsts.values()}:
        weight = weights[name].detach()
        copy = room.get(name)
        if copy is None or (copy.shape, copy.dtype) != (weight.shape, weight.dtype):
            copy = room[name] = torch.empty_like(weight, device="cpu", pin_memory=is_kept and weight.is_cuda)
        copy.copy_(weight, non_blocking=True)
    if any(weight.is_cuda for weight in weights.values()):
        torch.cuda.current_stream().synchronize()
    return {name: room[first] for name, first in firsts.items()}


def with_tied(weights: dict[str, Tensor], own: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return a file's weights, with tied weights under all names that they have in `own`, the network's state dict.

    The file may have them under their first name alone.
    """
    others = {name: first for name, first in first_names(own).items() if name not in weights and first in weights}
    return {**weights, **{name: weights[first] for name, first in others.items()}}


def add_frozen_weights(
    weights: dict[str, Tensor], model: nn.Module, path: str | Path, called: str = "model_state"
) -> dict[str, Tensor]:
    """Return a file's weights, with the network's frozen weights added if the training left those out of the file.

    The file's metadata have a digest of the frozen weights that were left out. Without such a digest, `weights` are
    returned unchanged.

    Args:
        weights: the file's weights.
        model: the network, with the frozen weights that the user's model() gives it.
        path: the file, whose metadata are read.
        called: what the message calls the file.

    Returns:
        The weights by name: `weights` itself, or a new dict with the network's frozen tensors added.

    Raises:
        InputError: the network's frozen weights differ from those of the training.
    """
    base = {name: value for name, value in frozen_weights(model).items() if name not in weights}
    metadata = read_metadata(path) if base else None
    if not metadata or not metadata.base_digest:
        return weights
    if compute_base_digest(base) != metadata.base_digest:
        raise InputError(
            f"{called} leaves out {listed(sorted(base))}, which model() freezes and which are others now than in the "
            f"training of {path}: give the settings, data and init of that training"
        )
    return {**weights, **base}


def misfits(weights: Mapping[str, Tensor], own: Mapping[str, Tensor]) -> list[str]:
    """Return the names of tensors that only one of the two has, or whose shapes differ."""
    shapes = [{name: value.shape for name, value in one.items()} for one in (weights, own)]
    return [name for name in sorted({*weights, *own}) if shapes[0].get(name) != shapes[1].get(name)]


def describe_misfits(names: Sequence[str], weights: Mapping[str, Tensor], own: Mapping[str, Tensor]) -> str:
    """Describe tensors that do not fit: "missing keys a, b; unexpected keys d; wrong shapes c (2,) instead of (3,)".

    Args:
        names: the tensors that do not fit, as misfits() returns them. A name in both mappings is listed as a wrong
            shape.
        weights: the given tensors.
        own: the network's tensors.
    """
    both = [name for name in names if name in weights and name in own]
    kinds = {
        "missing keys": [name for name in names if name not in weights],
        "unexpected keys": [name for name in names if name not in own],
        "wrong shapes": [f"{name} {tuple(weights[name].shape)} instead of {tuple(own[name].shape)}" for name in both],
    }
    return "; ".join(f"{kind} {listed(entries)}" for kind, entries in kinds.items() if entries)


def _read_safetensors(path: str | Path) -> dict[str, Tensor]:
    try:
        from safetensors.torch import load_file
    except ImportError:
        raise InputError(f"this file needs {not_installed('safetensors', 'export')}, or load a .pt file") from None
    return load_file(path)


def save(content: Any, file: IO[bytes], checksums: bool = True) -> None:
    """Save the content by torch.save. Raises OSError, not torch's RuntimeError, if the file cannot be written.

    Args:
        content: what to save, which may be anything that torch.save takes.
        file: a file open for writing.
        checksums: whether to write torch's own checksums, which take half of the time.
    """
    try:
        with serialization_config.patch("save.compute_crc32", checksums):  # type: ignore[attr-defined]
            torch.save(content, file)
    except Exception as error:
        if isinstance(error.__context__, OSError):  # torch wraps the error of a small write
            raise error.__context__ from None
        raise
