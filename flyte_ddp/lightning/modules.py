"""Builds the user's LightningModule and LightningDataModule from the settings."""

import inspect
import pkgutil
from typing import Any

from lightning.pytorch import LightningDataModule, LightningModule
from lightning.pytorch.utilities.model_helpers import is_overridden

from flyte_ddp.code.user_code import checked_imports
from flyte_ddp.errors import InputError
from flyte_ddp.launch.rank import own_lock_of_tqdm
from flyte_ddp.lightning.job import LightningJob


def build(job: LightningJob) -> tuple[LightningModule, LightningDataModule | None]:
    """The module and its data; raises InputError if they are no such classes, or cannot be built from the settings."""
    with checked_imports(job.root, job.files):
        module = _made(job.recipe, LightningModule, job)
        data = _made(job.datamodule, LightningDataModule, job) if job.datamodule else None
    if not any(is_overridden("train_dataloader", one) for one in (module, data) if one):
        raise InputError(f"{job.datamodule or job.recipe} must define train_dataloader, which returns what to train on")
    return module, data


def _made(name: str, base: type, job: LightningJob) -> Any:
    """An object of the named class: each parameter of its __init__ gets the setting of its name."""
    kind = pkgutil.resolve_name(name)
    own_lock_of_tqdm()
    if not (isinstance(kind, type) and issubclass(kind, base)):
        raise InputError(
            f"{name} must be a subclass of lightning.pytorch.{base.__name__} (that of the package pytorch_lightning is "
            f"another class), got {kind!r}"
        )
    given = {
        "settings": job.settings,
        "data_path": job.data,
        "loader_workers": job.options.loader_workers,
        "pin_memory": job.options.pin_memory,
        **vars(job.settings),
    }
    parameters = inspect.signature(kind).parameters.values()
    variable = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    missing = [one.name for one in parameters if one.default is one.empty and one.kind not in variable]
    missing = [parameter for parameter in missing if parameter not in given]
    if missing:
        raise InputError(
            f"{name}.__init__ needs {', '.join(missing)}, and {type(job.settings).__name__} has no such field: add "
            "one, or give the parameter a default"
        )
    return kind(**{one.name: given[one.name] for one in parameters if one.name in given})
