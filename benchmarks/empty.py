"""The smallest possible `pyflyte run`, to compare start-up times with."""

from flytekit import task, workflow


@task
def nothing() -> int:
    return 0


@workflow
def empty_wf() -> int:
    return nothing()
