"""The least that `pyflyte run` can do: what start-up times are compared with."""

from flytekit import task, workflow


@task
def nothing() -> int:
    return 0


@workflow
def empty_wf() -> int:
    return nothing()
