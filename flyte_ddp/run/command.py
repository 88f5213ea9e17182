"""The command `python -m flyte_ddp run RECIPE --epochs 1`, which trains on this machine.

It has an option for each field of the settings and of RunOptions.
"""

import dataclasses
import pkgutil
import re
import sys
from pathlib import Path
from typing import Any

import click

from flyte_ddp.attempt.registration import check_variables
from flyte_ddp.code.code_version import find_parts, source_file
from flyte_ddp.code.user_code import find_code
from flyte_ddp.errors import InputError
from flyte_ddp.fields import TYPE_NAMES, describe_fields, find_default, find_type, read_json
from flyte_ddp.settings import RunOptions, TrainingSettings
from flyte_ddp.training import train
from flyte_ddp.whole_files import absolute


class Recipes(click.Group):
    """A group of commands that has a command for each recipe it is asked for."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return []

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command:
        check_variables()
        here = str(absolute("", "RECIPE"))
        if here not in sys.path:  # `python -m` has the current folder on the path
            sys.path.insert(0, here)
        find_code(cmd_name)
        return make_command(cmd_name, find_settings_class(cmd_name, ctx.params["settings_class"]))


@click.group(cls=Recipes, subcommand_metavar="RECIPE [OPTIONS]...")
@click.option("--settings-class", metavar="MODULE:NAME", help="By default Settings of settings.py beside the recipe.")
def run(settings_class: str | None) -> None:
    """Train a recipe, or a loop of your own, on this machine.

    RECIPE is its name, package.module:Name. `python -m flyte_ddp run RECIPE --help` lists its settings. Flyte is not
    asked: as a task, the same runs by `pyflyte run`. Under torchrun it is one of the ranks.
    """


def find_settings_class(recipe: str, name: str | None) -> type[TrainingSettings]:
    """Import the settings class of a recipe.

    Args:
        recipe: the recipe's name, "package.module:Name".
        name: the settings class, as "package.module:Name". None stands for the class Settings of a module "settings"
            beside the recipe's module, or for TrainingSettings if there is no such module.

    Raises:
        InputError: the class is not found, or is no subclass of TrainingSettings.
        Exception: whatever else the import of its module raises.
    """
    module = recipe.partition(":")[0]
    beside = f"{module.rpartition('.')[0]}.settings".lstrip(".")
    found = find_parts(beside, sys.path)
    has_file = len(found) > beside.count(".") and source_file(found[-1])  # a folder of that name has none
    if name is None and not has_file:
        return TrainingSettings
    name = name or f"{beside}:Settings"
    try:
        kind = pkgutil.resolve_name(name)
    except (AttributeError, ImportError, ValueError) as error:
        raise InputError(f"--settings-class must name the class of {recipe}'s settings, got {name}: {error}") from None
    if not (isinstance(kind, type) and issubclass(kind, TrainingSettings)):
        raise InputError(f"--settings-class must be a subclass of flyte_ddp.TrainingSettings, got {name}: {kind!r}")
    return kind


class RecipeCommand(click.Command):
    """A command whose message about an unknown option says which class the settings come from."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        try:
            return super().parse_args(ctx, args)
        except click.NoSuchOption as error:
            raise InputError(f"{error.format_message()} {self.epilog}") from None


def make_command(recipe: str, kind: type[TrainingSettings]) -> click.Command:
    """Return a command that trains the recipe, with an option for each field of the settings and of RunOptions.

    RunOptions.resume_from has no option. The command's own options are --data, --init and --output.

    Args:
        recipe: the recipe's name, "package.module:Name".
        kind: the class of its settings.

    Raises:
        InputError: A setting has the name of a field of RunOptions, or of one of the command's own options.
    """
    fields = {field.name: field for field in dataclasses.fields(kind)}
    how = {field.name: field for field in dataclasses.fields(RunOptions) if field.name != "resume_from"}
    for name in fields.keys() & {*how, "data", "init", "output", "help"}:
        raise InputError(
            f"{kind.__name__}.{name} must have another name, as --{name.replace('_', '-')} is an option of the command "
            "itself: rename it, or call flyte_ddp.train"
        )

    def call(data: str | None, init: str | None, output: Path, **values: Any) -> None:
        given = {name: value for name, value in values.items() if value is not None}
        settings = kind.from_dict({name: value for name, value in given.items() if name in fields})
        options = RunOptions.from_dict({name: value for name, value in given.items() if name in how})
        try:
            train(recipe, settings, options, data, output, init=init, report=True)
        except InputError as error:
            raise InputError(as_typed(error.message)) from None

    where = "The folder for weights, report.html, and the checkpoint that the same command resumes from."
    kind_of = click.Path(path_type=Path)
    own = [
        click.Option(["--data"], help="The file, folder or URL that the recipe reads."),
        click.Option(["--init"], type=click.Path(exists=True), help="Weights or a checkpoint to start with."),
        click.Option(["--output"], type=kind_of, default="trained", show_default=True, help=where),
    ]
    said = {**describe_fields(RunOptions), **describe_fields(kind)}
    options = [make_option(field, said[field.name]) for field in {**fields, **how}.values()]
    epilog = (
        f"The settings are those of {kind.__module__}.{kind.__name__}. For others, write --settings-class MODULE:NAME "
        "before RECIPE."
    )
    doing = f"Train {recipe} on this machine."
    return RecipeCommand(recipe, params=[*own, *options], callback=call, help=doing, epilog=epilog)


def as_typed(message: str) -> str:
    """Replace options by what a user types: RunOptions(resume=False) becomes --resume false."""

    def typed(match: re.Match[str]) -> str:
        return f"--{match[1].replace('_', '-')} {match[2].lower()}"

    return re.sub(r"RunOptions\((\w+)=(\w+)\)", typed, message)


def make_option(field: "dataclasses.Field[Any]", said: str) -> click.Option:
    """Return the command-line option for a field of the settings or options.

    An option that the user leaves out has the value None. If the field is a string, a given value is taken as it is.
    Any other value is parsed as JSON; true and false of a bool may be in upper or lower case. The option does not check
    the type of the parsed value. A field without a default is a required option.

    While click parses the command line, the option raises InputError if the given value is not JSON, or if an object in
    it has a name twice.

    Args:
        field: the field.
        said: the option's help.
    """
    kind = find_type(field)
    is_required = find_default(field) is dataclasses.MISSING

    def read(context: click.Context, parameter: click.Parameter, text: str | None) -> Any:
        if text is None or kind is str:
            return text
        try:
            return read_json(text.lower() if kind is bool else text)
        except ValueError:
            raise InputError(f"--{dashed} must be {TYPE_NAMES[kind]}, got {text}") from None

    dashed = field.name.replace("_", "-")
    names = [f"--{dashed}", field.name]
    return click.Option(names, metavar=kind.__name__, callback=read, help=said, required=is_required)
