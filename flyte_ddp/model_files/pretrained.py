"""A folder of weights in the layout that save_pretrained writes, checked before ranks start. Imports no torch."""

import json
import re
from pathlib import Path
from typing import Any

from flyte_ddp.errors import InputError

CONFIGS = ("config.json", "adapter_config.json")  # transformers and timm write the first, peft the second
INDEX = "*.safetensors.index.json"
ONE_OF_SEVERAL = re.compile(r"-\d+-of-\d+\.safetensors$")
MOST_HEADER_BYTES = 100 << 20  # the limit of the format
REMEDY = "write it anew with save_pretrained"


def check_pretrained(folder: Path) -> None:
    """Raise InputError unless a folder has a whole pretrained model: configuration, safetensors files and their index.

    The function reads the headers and lengths of the safetensors files, to notice a file that was cut off, but not the
    weights. Only files of a numbered series need an index. Every weight must be in the file that an index names for it.
    Raises OSError if a file cannot be read.
    """
    configs = [folder / name for name in CONFIGS if (folder / name).is_file()]
    if not configs:
        raise InputError(f"init must have a {' or '.join(CONFIGS)}, but {folder} has none: {REMEDY}")
    for config in configs:
        _json(config.read_bytes(), config)
    held = {file.name: _names_in(file) for file in sorted(folder.glob("*.safetensors"))}
    indexed: set[str] = set()
    for index in folder.glob(INDEX):
        weights = _json(index.read_bytes(), index).get("weight_map")
        if not isinstance(weights, dict) or not all(isinstance(file, str) for file in weights.values()):
            raise _damaged(index)
        for name, file in weights.items():
            if name not in held.get(file, ()):
                raise InputError(
                    f"init must have all weights of {index.name}, but {folder} lacks {name} in {file}: {REMEDY}"
                )
        indexed |= {*weights.values()}
    if not held:
        raise InputError(f"init must have weights as .safetensors, but {folder} has none: {REMEDY}")
    if lonely := [name for name in held if ONE_OF_SEVERAL.search(name) and name not in indexed]:
        raise InputError(f"init must have the index of its files, but {folder} has none for {lonely[0]}: {REMEDY}")


def _names_in(file: Path) -> list[str]:
    """Return the names of the tensors in a safetensors file, from its header alone.

    The file has eight bytes with the header's length, the header as JSON, then the data.

    Raises:
        InputError: The header is damaged, or the file is longer or shorter than its header says.
        OSError: The file cannot be read.
    """
    with open(file, "rb") as opened:
        length = int.from_bytes(opened.read(8), "little")
        header = _json(opened.read(min(length, MOST_HEADER_BYTES)), file)
    tensors = {name: entry for name, entry in header.items() if name != "__metadata__"}
    try:
        end = max((int(entry["data_offsets"][1]) for entry in tensors.values()), default=0)
    except (KeyError, IndexError, OverflowError, TypeError, ValueError):
        end = -1
    if file.stat().st_size != 8 + length + end:
        raise _damaged(file)
    return list(tensors)


def _json(content: bytes, file: Path) -> dict[str, Any]:
    try:
        value = json.loads(content)
    except (ValueError, RecursionError):
        value = None
    if not isinstance(value, dict):
        raise _damaged(file)
    return value


def _damaged(file: Path) -> InputError:
    return InputError(f"init must have whole files, but {file} was cut off or damaged: {REMEDY}")
