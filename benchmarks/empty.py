"""The least that `pyflyte run` can do, and the least with a dataclass for input and a task that is remembered."""

from dataclasses import dataclass

from flytekit import Cache, task, workflow


@dataclass(frozen=True)
class Number:
    value: int = 0


@task
def nothing() -> int:
    return 0


@task(cache=Cache(version="1"))
def same(number: Number) -> Number:
    return number


@workflow
def empty_wf() -> int:
    return nothing()


@workflow
def cached_wf(number: Number = Number()) -> Number:
    return same(number=number)
