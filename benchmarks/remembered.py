"""The smallest possible `pyflyte run` with a dataclass as input and a cached task."""

from dataclasses import dataclass

from flytekit import Cache, task, workflow


@dataclass(frozen=True)
class Number:
    value: int = 0


@task(cache=Cache(version="1"))
def same(number: Number) -> Number:
    return number


@workflow
def remembered_wf(number: Number = Number()) -> Number:
    return same(number=number)
