"""The help of `pyflyte run` and `flyte run` on settings, and their answer to a setting that is given as an option."""

import dataclasses
import json
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import click

from flyte_ddp.fields import Settings, describe_fields, find_default

_kinds_of: list[Callable[[click.ParamType], Any]] = []  # of flytekit's options, of flyte's, or of both


def explain_settings(kind_of: Callable[[click.ParamType], Any]) -> None:
    """Patch click, for the rest of the process, so that commands explain settings.

    The help of an option whose type is a Settings class shows one line per setting instead of a JSON schema. The
    message about an unknown option says where it belongs: --epochs is a field of --hp. Call the function before the
    options are made, once for each platform.

    Args:
        kind_of: gets the click type of any option, and returns the Python type that the option is converted to, or
            anything else if it does not know. An option is explained if any platform's `kind_of` knows its Settings
            class.
    """
    _kinds_of.append(kind_of)
    if len(_kinds_of) > 1:
        return
    make = click.Option.__init__
    refuse = click.NoSuchOption.__init__

    def find_settings(option: click.ParamType) -> type[Settings] | None:
        kinds = [kind_of(option) for kind_of in _kinds_of]
        return next((kind for kind in kinds if isinstance(kind, type) and issubclass(kind, Settings)), None)

    def init(self: click.Option, *arguments: Any, **named: Any) -> None:
        make(self, *arguments, **named)
        if kind := find_settings(self.type):
            whole = (self.help or "").partition(": {")[0]  # the schema begins with ": {"
            # Some commands render this Markdown list; others show a line for each paragraph
            self.help = "\n\n".join([whole, *(f"- {name}: {text}" for name, text in describe_fields(kind).items())])
            self.metavar = "JSON"
            self.show_default = False

    def init_error(
        self: click.NoSuchOption,
        option_name: str,
        message: str | None = None,
        possibilities: Iterable[str] | None = None,
        ctx: click.Context | None = None,
    ) -> None:
        refuse(self, option_name, message, possibilities, ctx)
        kinds = {one.opts[0]: find_settings(one.type) for one in ctx.command.params} if ctx else {}
        hint = _hint(option_name, {option: kind for option, kind in kinds.items() if kind})
        if hint:
            self.message = f"{self.message} {hint}"  # type: ignore[misc]
            self.possibilities = None  # type: ignore[misc]

    # flytekit and flyte make their commands and options themselves, and have no hook for either
    click.Option.__init__ = init  # type: ignore[method-assign]
    click.NoSuchOption.__init__ = init_error  # type: ignore[method-assign]


def _hint(option: str, kinds: Mapping[str, type[Settings]]) -> str:
    """Return a hint if an unknown option is a field of one of the command's settings; otherwise "".

    For --batch-size, the hint says that batch_size is a field of --hp, and gives an example: --hp '{"batch_size": 64}'.

    Args:
        option: the option as typed.
        kinds: the classes of the command's settings, by option.
    """
    name = option.lstrip("-").replace("-", "_")
    for settings, kind in kinds.items():
        fields = {field.name: field for field in dataclasses.fields(kind)}  # type: ignore[arg-type]
        if name in fields:
            default = find_default(fields[name])
            value = "VALUE" if default is dataclasses.MISSING else json.dumps(default)
            return f"{name} is a field of {settings}: {settings} '{{\"{name}\": {value}}}'"
    return ""
