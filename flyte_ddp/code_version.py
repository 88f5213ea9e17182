"""A version of code that changes whenever the code does."""

import hashlib
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Sequence

import flyte_ddp
from flyte_ddp.errors import ReportedError

LIBRARY = ("[!_]*.py", "launch/*.py", "data/*.py", "engine/*.py", "recipes/*.py")
OTHER_CODE = "leave out --copy none, so that the code is sent, or rebuild the image"


def code_version(sources: Sequence[str], distributions: Sequence[str]) -> str:
    """A hash of files, named relative to the folder that holds flyte_ddp, and of installed distributions' versions."""
    digest, root = hashlib.sha256(), Path(flyte_ddp.__path__[0]).parent
    for name in sources:
        try:
            digest.update((root / name).read_bytes())
        except FileNotFoundError:
            raise ReportedError(f"{name} is missing here: {OTHER_CODE}") from None
    for name in distributions:
        with suppress(PackageNotFoundError):
            digest.update(f"{name}=={version(name)}".encode())
    return digest.hexdigest()[:16]


def library_version() -> str:
    """The version of all code here that ranks may import, and of torch: checkpoints are valid only for the same one."""
    root = Path(flyte_ddp.__path__[0])
    files = sorted(file for pattern in LIBRARY for file in root.glob(pattern))
    return code_version([str(file.relative_to(root.parent)) for file in files], ["torch"])
