"""The help of `pyflyte run` and `flyte run` on settings, and their answer to a setting that is given as an option."""

import dataclasses
import json
from collections.abc import Callable, Iterable
from typing import Any

import click

from flyte_ddp.fields import Settings, describe_fields, find_default


def explain_unknown_options(kind_of: Callable[[click.ParamType], Any]) -> None:
    """Make commands say where an unknown option belongs: --epochs is a field of --hp. A second call does no harm.

    This patches click, because flytekit and flyte make their commands themselves, and have no hook for it.

    Args:
        kind_of: returns the Python type that an option is converted to, or anything else if there is none.
    """
    original = getattr(click.NoSuchOption.__init__, "original", click.NoSuchOption.__init__)

    def init(
        self: click.NoSuchOption,
        option_name: str,
        message: str | None = None,
        possibilities: Iterable[str] | None = None,
        ctx: click.Context | None = None,
    ) -> None:
        original(self, option_name, message, possibilities, ctx)
        hint = _hint(option_name, ctx.command.params, kind_of) if ctx else ""
        if hint:
            self.message = f"{self.message} {hint}"  # type: ignore[misc]
            self.possibilities = None  # type: ignore[misc]

    init.original = original  # type: ignore[attr-defined]
    click.NoSuchOption.__init__ = init  # type: ignore[method-assign]


def describe_settings(kind_of: Callable[[click.ParamType], Any]) -> None:
    """Patch click so that the help of an option shows one line per setting instead of a JSON schema.

    The patch replaces click.Option.__init__, because flytekit and flyte make these options themselves. It changes only
    options whose type is a Settings class. A second call replaces the first patch.

    Args:
        kind_of: returns the Python type that an option is converted to. Any other value leaves the option
            unchanged.
    """
    original = getattr(click.Option.__init__, "original", click.Option.__init__)

    def init(self: click.Option, *arguments: Any, **named: Any) -> None:
        original(self, *arguments, **named)
        kind = kind_of(self.type)
        if isinstance(kind, type) and issubclass(kind, Settings):
            whole = (self.help or "").partition(": {")[0]  # the schema begins with ": {"
            # Some commands render this Markdown list; others show a line for each paragraph
            self.help = "\n\n".join([whole, *(f"- {name}: {text}" for name, text in describe_fields(kind).items())])
            self.metavar = "JSON"
            self.show_default = False

    init.original = original  # type: ignore[attr-defined]
    click.Option.__init__ = init  # type: ignore[method-assign]


def _hint(option: str, parameters: Iterable[click.Parameter], kind_of: Callable[[click.ParamType], Any]) -> str:
    """Return a hint if an unknown option is a field of one of the command's settings; otherwise "".

    For --batch-size, the hint says that batch_size is a field of --hp, and gives an example: --hp '{"batch_size": 64}'.

    Args:
        option: the option as typed.
        parameters: the parameters of the command.
        kind_of: returns the Python type that a parameter of this click type is converted to, or anything else if there
            is none.
    """
    name = option.lstrip("-").replace("-", "_")
    for parameter in parameters:
        kind = kind_of(parameter.type)
        if isinstance(kind, type) and issubclass(kind, Settings):
            fields = {field.name: field for field in dataclasses.fields(kind)}  # type: ignore[arg-type]
            if name in fields:
                default = find_default(fields[name])
                value = "VALUE" if default is dataclasses.MISSING else json.dumps(default)
                return f"{name} is a field of {parameter.opts[0]}: {parameter.opts[0]} '{{\"{name}\": {value}}}'"
    return ""
