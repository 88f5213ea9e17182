"""The user's LightningModule, LightningDataModule and callbacks, built from the settings."""

import inspect
import pkgutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from itertools import chain
from typing import Any

from lightning.pytorch import Callback, LightningDataModule, LightningModule, Trainer
from lightning.pytorch.callbacks import ProgressBar
from lightning.pytorch.utilities.model_helpers import is_overridden

from flyte_ddp.code.user_code import checked_imports
from flyte_ddp.errors import InputError
from flyte_ddp.launch.output import own_lock_of_tqdm
from flyte_ddp.lightning.job import LightningJob
from flyte_ddp.lightning.settings import CALLED, LightningSettings
from flyte_ddp.text import did_you_mean


@dataclass(frozen=True)
class Parts:
    """A module, its data and its callbacks.

    Attributes:
        data: None if the module has its own.
        callbacks: without progress bars, as the terminal and the report show the progress.
    """

    module: LightningModule
    data: LightningDataModule | None
    callbacks: list[Callback]

    @property
    def owners(self) -> list[LightningModule | LightningDataModule]:
        """The objects that can have loaders."""
        return [self.module, self.data] if self.data else [self.module]


def build(job: LightningJob) -> Parts:
    """Import the user's module, data and callbacks by name, call each with its settings, and return the results.

    Data and callbacks are optional. Progress bars among the callbacks are left out.

    Raises:
        InputError: the module, the data or the callbacks are of another type than Lightning's; one of them has a
            parameter that has no default and is no setting; a field of the user's settings is a parameter of none of
            them; neither module nor data define train_dataloader; or a file was imported by a computed name.
        Exception: whatever the import, or a call of the user's code, raises.
    """
    with checked_imports(job.root, job.files):
        kind = _find_class(job.recipe, LightningModule)
        kind_of_data = _find_class(job.datamodule, LightningDataModule) if job.datamodule else None
        find_callbacks = _find_function(job.callbacks) if job.callbacks else None
        callables = {job.recipe: kind, job.datamodule: kind_of_data, job.callbacks: find_callbacks}
        called = {name: one for name, one in callables.items() if one}
        made = {name: _call_with_settings(name, one, job) for name, one in called.items()}
    callbacks = _without_progress_bars(job, made.get(job.callbacks, []))
    parts = Parts(made[job.recipe], made.get(job.datamodule), callbacks)
    if not any(is_overridden("train_dataloader", one) for one in parts.owners):
        raise InputError(f"{job.datamodule or job.recipe} must define train_dataloader, which returns what to train on")
    _refuse_unused_settings([*called.values()], job)
    return parts


def _find_function(name: str) -> Callable[..., Any]:
    """Import the function of this name, "package.module:name". Raises InputError if it is a class or no function."""
    function: Any = pkgutil.resolve_name(name)
    if isinstance(function, type) or not callable(function):
        raise InputError(f"{name} must be a function that returns a list of callbacks, got {function!r}: write def")
    return function


def _without_progress_bars(job: LightningJob, callbacks: Any) -> list[Callback]:
    """Return the callbacks without progress bars. Raises InputError if they are no list of Lightning's callbacks."""
    if not (isinstance(callbacks, (list, tuple)) and all(isinstance(one, Callback) for one in callbacks)):
        raise InputError(
            f"{job.callbacks} must return a list of lightning.pytorch.Callback (that of the package pytorch_lightning "
            f"is another class), got {callbacks!r}: return [...]"
        )
    return [one for one in callbacks if not isinstance(one, ProgressBar)]


def _find_class(name: str, base: type) -> type:
    """Import and return a class. Errors of the import pass unchanged.

    Args:
        name: the class, as "package.module:Name".
        base: a class of Lightning that it must derive from.

    Raises:
        InputError: the class does not derive from `base`.
    """
    kind: Any = pkgutil.resolve_name(name)
    own_lock_of_tqdm()
    if not (isinstance(kind, type) and issubclass(kind, base)):
        raise InputError(
            f"{name} must be a subclass of lightning.pytorch.{base.__name__} (that of the package pytorch_lightning is "
            f"another class), got {kind!r}"
        )
    return kind


def _refuse_unused_settings(called: Sequence[Callable[..., Any]], job: LightningJob) -> None:
    """Raise InputError for a field of the user's settings that none of these callables takes as a parameter.

    Fields of LightningSettings itself are allowed, because the library uses them. A parameter named `settings` takes
    all fields.
    """
    # Nothing would obey such a field, while the report says that it was used
    taken = {*chain.from_iterable(inspect.signature(one).parameters for one in called)}
    of_trainer = {field.name for field in fields(LightningSettings)}
    unused = [field.name for field in fields(job.settings) if field.name not in taken | of_trainer]
    if unused and "settings" not in taken:
        who = " and ".join(one.__name__ for one in called)
        if unused[0] in inspect.signature(Trainer).parameters:
            here = CALLED.get(unused[0], "not to be set")
            raise InputError(
                f"{type(job.settings).__name__}.{unused[0]} must be a parameter, by this name, of {who}; "
                f"the Trainer's argument of this name is {here} here: remove the field"
            )
        raise InputError(
            f"{type(job.settings).__name__}.{unused[0]} must be a parameter, by this name, of {who}, or "
            f"nothing obeys it{did_you_mean(unused[0], taken)}: rename either, take `settings`, or remove the field"
        )


def _call_with_settings(name: str, kind: Callable[..., Any], job: LightningJob) -> Any:
    """Call a class or function with the values that its parameters' names ask for, and return the result.

    A parameter may have the name of a field of the settings, or be `settings`, `data_path`, `loader_workers` or
    `pin_memory`. A parameter of any other name keeps its default.

    Args:
        name: the name of the class or function, for the message.
        kind: the class or function.
        job: the training, with the values.

    Raises:
        InputError: a parameter of another name has no default.
    """
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
            f"{name} needs {', '.join(missing)}, and {type(job.settings).__name__} has no such field: add "
            "one, or give the parameter a default"
        )
    return kind(**{one.name: arguments[one.name] for one in parameters if one.name in arguments})
