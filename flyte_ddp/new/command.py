"""The command `python -m flyte_ddp new NAME`, which creates a project, ready to train."""

import json
import keyword
import os
import re
import shlex
import shutil
import sys
from collections.abc import Iterator
from importlib.machinery import PathFinder
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path
from typing import Any

import click

import flyte_ddp
from flyte_ddp.code.code_version import LIBRARY, is_installed
from flyte_ddp.errors import InputError
from flyte_ddp.text import shortened
from flyte_ddp.whole_files import absolute, temporary_beside, writing_to


@click.command()
@click.argument("name", type=click.Path(path_type=Path))
@click.option(
    "--library",
    metavar="REQUIREMENT",
    help="The requirement to install this library with, such as "
    "'flyte-ddp-training @ git+https://HOST/REPOSITORY@COMMIT'. By default, where it is installed from here.",
)
@click.option("--flyte2", is_flag=True, help="A project for Flyte 2, whose SDK is flyte, instead of flytekit.")
def new(name: Path, library: str, flyte2: bool) -> None:
    """Create a project in a new folder.

    NAME is the folder, which must not exist, and its last part the name of the Python package in it. The project has a
    recipe, its settings, a workflow, a test, a Makefile and a Dockerfile, and trains without changes.
    """
    requirement = check_requirement(library) if library else installed_from()
    if flyte2:
        requirement = with_extra(requirement, "flyte2")
    write_project(name, requirement, flyte2)
    click.echo(f"Project:  {name}\nLibrary:  {requirement}\nNext:     make -C {shlex.quote(str(name))} test run")


# --- files of a project ---

# Itself a working project, whose package's name is replaced in all paths and files
TEMPLATE = Path(__file__).with_name("template")
FLYTE2 = Path(__file__).with_name("flyte2") / "template"  # the files that differ for Flyte 2
TEMPLATE_NAME = "my_project"


def write_project(folder: Path, library: str, flyte2: bool = False) -> None:
    """Write a new project from the template into a new folder. A failure leaves no folder.

    Args:
        folder: the new folder, whose name becomes that of the project's package.
        library: the requirement for this library in the project's pyproject.toml.
        flyte2: whether the project is for Flyte 2.

    Raises:
        InputError: the name is invalid, the folder exists, or it cannot be written.
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
    """Yield the path and the text of each file of a new project; nothing is written.

    The paths are relative to the project's folder.

    Args:
        name: the package's name, which replaces the template's in paths and texts.
        library: the requirement for this library, which goes into pyproject.toml.
        flyte2: whether the project is for Flyte 2, for which some files differ.
    """
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
    """Raise InputError for a name that a new project cannot have.

    The name must be a Python package name of at most 100 lower-case letters, digits and single underscores. It must be
    no keyword, and not the name of an installed or standard package.
    """
    # An image and a distribution can have such a name, too
    if len(name) > 100 or not re.fullmatch("[a-z][a-z0-9]*(_[a-z0-9]+)*", name) or keyword.iskeyword(name):
        raise InputError(
            "NAME must be a Python package name of at most 100 lower-case letters, digits and single underscores, not "
            f"a keyword, got {shortened(name, 100)!r}: choose one like flower_images"
        )
    installed = [folder for folder in sys.path if is_installed(folder)]
    is_taken = name in sys.stdlib_module_names or name in (LIBRARY, "tests") or PathFinder.find_spec(name, installed)
    if is_taken:
        raise InputError(f"NAME must not be the name of an existing package, got {name!r}: choose one like my_{name}")


# --- requirement ---

# No public index has this library, so a user's project must say from where
DISTRIBUTION = "flyte-ddp-training"
REMEDY = f"write it as '{DISTRIBUTION} @ git+https://HOST/REPOSITORY@COMMIT'"


def check_requirement(text: str) -> str:
    """Return the text unchanged if it is a requirement of this library with a version or a URL.

    Examples are 'flyte-ddp-training==0.1.0' and 'flyte-ddp-training @ git+https://…'. Whether pip can install it is not
    checked.

    Raises:
        InputError: the text is something else, such as the bare name.
    """
    if not re.fullmatch(rf"{DISTRIBUTION}(\[[a-z0-9,]+\])? *(@|[=<>~!]=?) *[^\s\"\\]+", text):
        raise InputError(f"--library must be a requirement of {DISTRIBUTION}, got {text!r}: {REMEDY}")
    return text


def with_extra(requirement: str, extra: str) -> str:
    """Return a requirement that check_requirement accepts with one more of the library's extras."""
    extras, rest = re.fullmatch(rf"{DISTRIBUTION}(?:\[([a-z0-9,]+)\])?(.*)", requirement).groups()  # type: ignore[union-attr]
    names = sorted({*(extras or extra).split(","), extra})
    return f"{DISTRIBUTION}[{','.join(names)}]{rest}"


def installed_from() -> str:
    """Return the requirement by which pip installs the library that runs here.

    It names the checkout that the library runs from, or what pip installed it from (PEP 610), or else its version.
    Raises InputError if the library is neither in a checkout nor installed by pip.
    """
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
