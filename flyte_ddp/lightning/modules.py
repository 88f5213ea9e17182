"""Builds the user's LightningModule and LightningDataModule from the settings."""

import inspect
import pkgutil
from collections.abc import Sequence
from dataclasses import fields
from typing import Any

from lightning.pytorch import LightningDataModule, LightningModule, Trainer
from lightning.pytorch.utilities.model_helpers import is_overridden

from flyte_ddp.code.user_code import checked_imports
from flyte_ddp.errors import InputError
from flyte_ddp.launch.rank import own_lock_of_tqdm
from flyte_ddp.lightning.job import LightningJob
from flyte_ddp.lightning.settings import LightningSettings
from flyte_ddp.text import did_you_mean

# Arguments of Lightning's Trainer that have another name, or place, here
COUNTERPARTS = {
    "max_epochs": "the setting epochs",
    "log_every_n_steps": "the setting log_interval",
    "devices": "options.nproc",
    "num_nodes": "DDP_NNODES, where the task is registered",
    "strategy": "options.strategy",
    "logger": "options.tracking",
    "callbacks": "what the module's configure_callbacks returns",
}


def build(job: LightningJob) -> tuple[LightningModule, LightningDataModule | None]:
    """The module and its data; raises InputError if they are no such classes, or cannot be built from the settings."""
    with checked_imports(job.root, job.files):
        kinds = [(job.recipe, LightningModule), *([(job.datamodule, LightningDataModule)] if job.datamodule else [])]
        classes = [_class_of(name, base) for name, base in kinds]
        module, *rest = [_made(name, kind, job) for (name, _), kind in zip(kinds, classes, strict=True)]
        data = rest[0] if rest else None
    if not any(is_overridden("train_dataloader", one) for one in (module, data) if one):
        raise InputError(f"{job.datamodule or job.recipe} must define train_dataloader, which returns what to train on")
    _check_taken(classes, job)
    return module, data


def _class_of(name: str, base: type) -> type:
    kind: Any = pkgutil.resolve_name(name)
    own_lock_of_tqdm()
    if not (isinstance(kind, type) and issubclass(kind, base)):
        raise InputError(
            f"{name} must be a subclass of lightning.pytorch.{base.__name__} (that of the package pytorch_lightning is "
            f"another class), got {kind!r}"
        )
    return kind


def _check_taken(classes: Sequence[type], job: LightningJob) -> None:
    """Raises InputError for a setting that nothing would obey, while the report says that it was used."""
    taken = {parameter for kind in classes for parameter in inspect.signature(kind).parameters}
    of_trainer = {field.name for field in fields(LightningSettings)}
    unused = [field.name for field in fields(job.settings) if field.name not in taken | of_trainer]
    if unused and "settings" not in taken:
        who = " and ".join(kind.__name__ for kind in classes)
        if unused[0] in inspect.signature(Trainer).parameters:
            here = COUNTERPARTS.get(unused[0], "not to be set")
            raise InputError(
                f"{type(job.settings).__name__}.{unused[0]} must be a parameter of __init__, by this name, in {who}; "
                f"the Trainer's argument of this name is {here} here: remove the field"
            )
        raise InputError(
            f"{type(job.settings).__name__}.{unused[0]} must be a parameter of __init__, by this name, in {who}, or "
            f"nothing obeys it{did_you_mean(unused[0], taken)}: rename either, take `settings`, or remove the field"
        )


def _made(name: str, kind: type, job: LightningJob) -> Any:
    """An object of the named class: each parameter of its __init__ gets the setting of its name."""
    arguments = {
        "settings": job.settings,
        "data_path": job.data,
        "loader_workers": job.options.loader_workers,
        "pin_memory": job.options.pin_memory,
        **vars(job.settings),
    }
    parameters = inspect.signature(kind).parameters.values()
    variable = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    missing = [one.name for one in parameters if one.default is one.empty and one.kind not in variable]
    missing = [parameter for parameter in missing if parameter not in arguments]
    if missing:
        raise InputError(
            f"{name}.__init__ needs {', '.join(missing)}, and {type(job.settings).__name__} has no such field: add "
            "one, or give the parameter a default"
        )
    return kind(**{one.name: arguments[one.name] for one in parameters if one.name in arguments})
