"""The requirement by which pip finds this library. No public index has it, so a user's project must say from where."""

import json
import re
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path
from typing import Any

import flyte_ddp
from flyte_ddp.errors import InputError

DISTRIBUTION = "flyte-ddp-training"
REMEDY = f"write it as '{DISTRIBUTION} @ git+https://HOST/REPOSITORY@COMMIT'"


def check_requirement(text: str) -> str:
    """Return the text if it is a requirement of this library. Only pip can find out whether it can be installed.

    Raises:
        InputError: the text is something else.
    """
    if not re.fullmatch(rf"{DISTRIBUTION}(\[[a-z0-9,]+\])? *(@|[=<>~!]=?) *[^\s\"\\]+", text):
        raise InputError(f"--library must be a requirement of {DISTRIBUTION}, got {text!r}: {REMEDY}")
    return text


def with_extra(requirement: str, extra: str) -> str:
    """Return the requirement with one more of the library's extras."""
    extras, rest = re.fullmatch(rf"{DISTRIBUTION}(?:\[([a-z0-9,]+)\])?(.*)", requirement).groups()  # type: ignore[union-attr]
    names = sorted({*(extras or extra).split(","), extra})
    return f"{DISTRIBUTION}[{','.join(names)}]{rest}"


def installed_from() -> str:
    """Return the requirement for the library that runs here: its checkout, or what pip installed it from (PEP 610)."""
    source = Path(flyte_ddp.__path__[0]).absolute().parent
    project = source / "pyproject.toml"
    # An editable installation, too, has the checkout's pyproject.toml
    if project.is_file() and f'name = "{DISTRIBUTION}"' in project.read_text():
        return f"{DISTRIBUTION} @ {source.as_uri()}"
    try:
        installed = distribution(DISTRIBUTION)
    except PackageNotFoundError:
        raise InputError(
            f"--library must be given if the library was not installed by pip, as in {source}: {REMEDY}"
        ) from None
    origin = installed.read_text("direct_url.json")
    return f"{DISTRIBUTION} @ {_url(json.loads(origin))}" if origin else f"{DISTRIBUTION}=={installed.version}"


def _url(origin: dict[str, Any]) -> str:
    folder = f"#subdirectory={origin['subdirectory']}" if "subdirectory" in origin else ""
    if "vcs_info" not in origin:
        return f"{origin['url']}{folder}"
    return f"{origin['vcs_info']['vcs']}+{origin['url']}@{origin['vcs_info']['commit_id']}{folder}"
