"""A name for code that changes whenever the code does."""

import hashlib
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Sequence

import workflows
from workflows.training.errors import ReportedError

OTHER_CODE = "leave out --copy none, so that the code is sent, or build the image anew"


def code_version(sources: Sequence[str], distributions: Sequence[str]) -> str:
    """A hash over files below workflows and the versions of distributions, of those that are installed."""
    digest = hashlib.sha256()
    for name in sources:
        try:
            digest.update(Path(workflows.__path__[0], name).read_bytes())
        except FileNotFoundError:
            raise ReportedError(f"workflows/{name} is missing here: {OTHER_CODE}") from None
    for name in distributions:
        with suppress(PackageNotFoundError):
            digest.update(f"{name}=={version(name)}".encode())
    return digest.hexdigest()[:16]
