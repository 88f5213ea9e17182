"""What every workflow file does first, so that pyflyte reads our inputs, and ships our code, as it should."""

import sys
from pathlib import Path
from types import ModuleType
from typing import Iterable

import flyte_ddp
from flyte_ddp.errors import ReportedError
from flyte_ddp.tasks.inputs import explain_missing_paths, explain_unreadable_settings
from flyte_ddp.user_code import is_installed, loaded_files


def set_up_pyflyte() -> None:
    """Raises ReportedError under Flyte 2's shim; calling it again does no harm."""
    refuse_shim()
    explain_unreadable_settings()
    explain_missing_paths()
    ship_whole_package()


def refuse_shim() -> None:
    if "flyte_migrate" in sys.modules:
        raise ReportedError(
            "this package cannot be run by Flyte 2's flyte_migrate: it drops the policies that our cache goes by, so "
            "that a model of older code would be returned as that of today's. Register with flytekit 1.16 (pyflyte)"
        )


def ship_whole_package() -> None:
    """Ships all modules of this package, also those of the ranks, unless it is installed: then the image has it."""
    root = Path(flyte_ddp.__path__[0])
    if not is_installed(str(root)):
        ship(map(str, sorted(root.rglob("*.py"))))


def ship(files: Iterable[str]) -> None:
    """Has `pyflyte run --remote` send these files, by absolute path, without importing them: the ranks' modules import
    torch. It sends what it takes for imported: of all in sys.modules the __file__, if that is below the project's root.
    """
    imported = set(loaded_files().values())  # they would be sent twice
    for file in files:
        name = f"{file} (file)"
        sys.modules.pop(name, None)  # it may have been imported since
        if file not in imported:
            sys.modules[name] = _File(name)
            sys.modules[name].__file__ = file


class _File(ModuleType):
    """A type of its own, so that loaded_files doesn't take it for imported."""
