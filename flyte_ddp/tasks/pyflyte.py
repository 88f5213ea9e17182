"""What every workflow file does first, so that pyflyte reads our inputs, and ships our code, as it should."""

import sys
from pathlib import Path
from types import ModuleType

import flyte_ddp
from flyte_ddp.tasks.inputs import explain_unreadable_settings
from flyte_ddp.training.errors import ReportedError


def set_up_pyflyte() -> None:
    """Raises ReportedError under Flyte 2's shim; calling it again does no harm."""
    refuse_shim()
    explain_unreadable_settings()
    ship_whole_package()


def refuse_shim() -> None:
    if "flyte_migrate" in sys.modules:
        raise ReportedError(
            "this package cannot be run by Flyte 2's flyte_migrate: it drops the policies that our cache goes by, so "
            "that a model of older code would be returned as that of today's. Register with flytekit 1.16 (pyflyte)"
        )


def ship_whole_package() -> None:
    """Has `pyflyte run --remote` send what it takes for imported: all modules of this package, also those of the ranks,
    which are never imported here, because they import torch."""
    root = Path(flyte_ddp.__path__[0])
    for file in sorted(root.rglob("*.py")):
        name = ".".join(file.relative_to(root.parent).with_suffix("").parts).removesuffix(".__init__")
        sys.modules.pop(f"{name} (file)", None)  # it may have been imported since
        if name not in sys.modules:
            stub = sys.modules[f"{name} (file)"] = ModuleType(name)
            stub.__file__ = str(file)
