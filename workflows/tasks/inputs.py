"""Readable answers to unreadable --hp and --options values."""

import json
from pathlib import Path
from typing import Any

import yaml
from flytekit.interaction.click_types import DirParamType, FileParamType, JsonParamType, UnionParamType

from workflows.training.errors import InputError
from workflows.training.settings import Settings


def read_settings(text: str) -> Any:
    """What JSON text, or a .json or .yaml file at a path, holds; raises InputError with the place and the reason."""
    try:
        if text.lstrip()[:1] in ("{", "["):
            return json.loads(text)
        return yaml.safe_load(Path(text).read_text())  # YAML contains JSON
    except json.JSONDecodeError as error:
        raise InputError(f"not JSON: {error.msg} at line {error.lineno}, column {error.colno} of {text}") from None
    except yaml.YAMLError as error:
        raise InputError(f"{text} is neither JSON nor YAML: {' '.join(str(error).split())}") from None
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise InputError(
            f"{text[:200]} cannot be read ({reason}): give a JSON object or a .json or .yaml file"
        ) from None


def explain_unreadable_settings() -> None:
    """Makes `pyflyte run` read our inputs with read_settings; flytekit's own reader ends in a traceback for a broken
    file and takes the name of a missing one for JSON. All other inputs stay flytekit's."""
    if getattr(JsonParamType._parse, "explains", False):
        return
    flytekits = JsonParamType._parse

    def parse(self: JsonParamType, value: Any, param: Any) -> Any:
        ours = isinstance(self._python_type, type) and issubclass(self._python_type, Settings)
        return read_settings(value) if ours and isinstance(value, str) else flytekits(self, value, param)

    parse.explains = True  # type: ignore[attr-defined]
    JsonParamType._parse = parse


def explain_missing_paths() -> None:
    """Makes `pyflyte run` say that an optional file or folder is missing; flytekit ends in a traceback, having tried to
    take its path for a None. All other optional inputs stay flytekit's."""
    if getattr(UnionParamType.convert, "explains", False):
        return
    flytekits = UnionParamType.convert

    def convert(self: UnionParamType, value: Any, param: Any, context: Any) -> Any:
        of_paths = [one for one in self._types if isinstance(one, (DirParamType, FileParamType))]
        if len(of_paths) == 1 and isinstance(value, str):
            return of_paths[0].convert(value, param, context)
        return flytekits(self, value, param, context)

    convert.explains = True  # type: ignore[attr-defined]
    UnionParamType.convert = convert
