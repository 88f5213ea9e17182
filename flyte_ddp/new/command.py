"""The command `python -m flyte_ddp new NAME`, which creates a project, ready to train."""

import shlex
from pathlib import Path

import click

from flyte_ddp.new.library import check_requirement, installed_from, with_extra
from flyte_ddp.new.project import write_project


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

    NAME is the folder, and its last part the name of the Python package in it. The project has a recipe, its settings,
    a workflow, a test, a Makefile and a Dockerfile, and trains without changes.
    """
    requirement = check_requirement(library) if library else installed_from()
    if flyte2:
        requirement = with_extra(requirement, "flyte2")
    write_project(name, requirement, flyte2)
    click.echo(f"Project:  {name}\nLibrary:  {requirement}\nNext:     make -C {shlex.quote(str(name))} test run")
