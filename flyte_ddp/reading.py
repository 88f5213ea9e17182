"""The reader of settings as users write them: JSON text, or a .json or .yaml file."""

import json
import re
from pathlib import Path
from typing import Any

import yaml

from flyte_ddp.errors import InputError
from flyte_ddp.fields import read_json, refuse_repeated


def read_settings(text: str) -> Any:
    """Parse settings as a user gives them, and return the value, which may be of any type.

    Args:
        text: JSON if it begins with { or [, otherwise the path of a file: JSON if its name ends with .json, else YAML.

    Raises:
        InputError: The file cannot be read. Or the JSON or YAML cannot be parsed, or repeats a key.
    """
    try:
        is_file = text.lstrip()[:1] not in ("{", "[")
        # utf-8-sig: editors on Windows begin a file with a byte order mark
        content = Path(text).read_text("utf-8-sig") if is_file else text
        if is_file and not text.endswith(".json"):
            return yaml.load(content, _Loader)  # _Loader is a SafeLoader
        return read_json(content)
    except json.JSONDecodeError as error:
        raise InputError(f"not JSON: {error.msg} at line {error.lineno}, column {error.colno} of {text}") from None
    except yaml.YAMLError as error:
        raise InputError(f"{text} is neither JSON nor YAML: {' '.join(str(error).split())}") from None
    except InputError as error:
        raise InputError(f"{text[:200]}: {error.message}") from None
    except (OSError, ValueError, RecursionError) as error:
        reason = getattr(error, "strerror", None) or error
        raise InputError(
            f"{text[:200] or repr(text)} cannot be read ({reason}): give a JSON object or a .json or .yaml file"
        ) from None


class _Loader(yaml.SafeLoader):
    """A YAML loader that refuses repeated keys. Yaml's own loader silently takes the last one."""

    def compose_mapping_node(self, anchor: Any) -> yaml.MappingNode:
        node = super().compose_mapping_node(anchor)
        refuse_repeated([key.value for key, _ in node.value if isinstance(key, yaml.ScalarNode)])
        return node


# 1e-3 is a number, as in JSON; YAML 1.1 has it as text
_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float", re.compile(r"[-+]?(\d+\.?\d*|\.\d+)[eE][-+]?\d+$"), list("-+.0123456789")
)
