"""The least that `pyflyte run` can do with a dataclass for input and a task that is cached."""

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
