"""The files of a user's new project, made from the template beside this module.

The template is itself a working project. Its package is called my_project, and that name is replaced in all paths and
files.
"""

import keyword
import os
import re
import shutil
import sys
from collections.abc import Iterator
from importlib.machinery import PathFinder
from pathlib import Path

from flyte_ddp.code.code_version import LIBRARY, is_installed
from flyte_ddp.errors import InputError
from flyte_ddp.new.library import DISTRIBUTION
from flyte_ddp.text import shortened
from flyte_ddp.whole_files import absolute, temporary_beside, writing_to

TEMPLATE = Path(__file__).with_name("template")
FLYTE2 = Path(__file__).with_name("flyte2") / "template"  # the files that differ for Flyte 2
TEMPLATE_NAME = "my_project"


def write_project(folder: Path, library: str, flyte2: bool = False) -> None:
    """Write the whole project or nothing.

    Args:
        folder: the new folder, whose name is the package's.
        library: the requirement for this library in the project's pyproject.toml.
        flyte2: whether the project is for Flyte 2.

    Raises:
        InputError: the name is invalid, or the folder exists.
    """
    folder = absolute(folder, "NAME")
    check_name(folder.name)
    if os.path.lexists(folder):
        raise InputError(f"NAME must be a new folder, got {folder}, which exists: choose another name or folder")
    beside = temporary_beside(folder)
    with writing_to(folder.parent, "NAME"):
        try:
            for path, text in project_files(folder.name, library, flyte2):
                (beside / path).parent.mkdir(parents=True, exist_ok=True)
                (beside / path).write_text(text)
            beside.rename(folder)
        finally:
            shutil.rmtree(beside, ignore_errors=True)


def project_files(name: str, library: str, flyte2: bool) -> Iterator[tuple[Path, str]]:
    """Yield each file's path in the project, and its text."""
    for common in sorted(TEMPLATE.rglob("*")):
        if common.is_file() and common.suffix != ".pyc":  # pip compiles the template along with the library
            place = common.relative_to(TEMPLATE)
            file = FLYTE2 / place if flyte2 and (FLYTE2 / place).exists() else common
            path = str(place).replace(TEMPLATE_NAME, name)
            text = file.read_text().replace(TEMPLATE_NAME, name)
            if path == "pyproject.toml":
                text = text.replace(f'"{DISTRIBUTION}"', f'"{library}"')
            yield Path(path), text


def check_name(name: str) -> None:
    """Raise InputError for a name that is not valid for a package, a distribution and an image, or hides another."""
    if len(name) > 100 or not re.fullmatch("[a-z][a-z0-9]*(_[a-z0-9]+)*", name) or keyword.iskeyword(name):
        raise InputError(
            "NAME must be a Python package name of at most 100 lower-case letters, digits and single underscores, not "
            f"a keyword, got {shortened(name, 100)!r}: choose one like flower_images"
        )
    installed = [folder for folder in sys.path if is_installed(folder)]
    is_taken = name in sys.stdlib_module_names or name in (LIBRARY, "tests") or PathFinder.find_spec(name, installed)
    if is_taken:
        raise InputError(f"NAME must not be the name of an existing package, got {name!r}: choose one like my_{name}")
