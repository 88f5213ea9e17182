"""python -m flyte_ddp new NAME: a project of one's own, ready to train."""

import shlex
from pathlib import Path

import click

from flyte_ddp.new.library import check_requirement, installed_from
from flyte_ddp.new.project import write_project


@click.command()
@click.argument("name", type=click.Path(path_type=Path))
@click.option(
    "--library",
    metavar="REQUIREMENT",
    help="What pip shall install this library by, as in 'flyte-ddp-training @ git+https://HOST/REPOSITORY@COMMIT'. "
    "Without it, the place that it is installed from here.",
)
def new(name: Path, library: str) -> None:
    """Write a project of your own into a new folder.

    NAME is the folder, and its last part the name of the Python package in it. The project has a recipe, its settings,
    a workflow, a test, a Makefile and a Dockerfile, and trains as it is.
    """
    requirement = check_requirement(library) if library else installed_from()
    write_project(name, requirement)
    click.echo(f"Project:  {name}\nLibrary:  {requirement}\nNext:     make -C {shlex.quote(str(name))} test run")
