"""The private parts of flytekit that we use exist, and do what they are used for."""

from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from flytekit import Cache, Deck, task
from flytekit.core.checkpointer import SyncCheckpoint
from flytekit.core.local_cache import LocalTaskCache
from flytekit.exceptions.user import FlyteRecoverableException, FlyteUserRuntimeException
from flytekit.interaction.click_types import FileParamType, JsonParamType, UnionParamType

from flyte_ddp.attempt.failures import to_failure
from flyte_ddp.flyte1 import flytekit_compat, platform
from flyte_ddp.flyte1.platform import TaskError, TaskInterruptedError


@dataclass
class Size:
    pixels: int
    text: str = ""


class Smaller(Size):
    pass


def test_json_inputs_of_ours_are_read_by_us(monkeypatch):
    monkeypatch.setattr(JsonParamType, "_parse", JsonParamType._parse)  # put back afterwards
    for pixels in (7, 8):
        flytekit_compat.read_json_inputs(Size, partial(Smaller, pixels))
    assert JsonParamType(Smaller).convert("as it comes", None, None) == Smaller(8, "as it comes")
    assert JsonParamType(dict).convert('{"pixels": 1}', None, None) == {"pixels": 1}


def test_an_input_of_several_kinds_tells_them():
    kinds = [FileParamType(), JsonParamType(dict)]
    assert sorted(map(str, flytekit_compat.alternatives(UnionParamType(kinds)))) == sorted(map(str, kinds))


calls: list[int] = []


@task(cache=Cache(version="1"))
def counted(number: int) -> int:
    calls.append(number)
    return number


def test_the_local_cache_can_be_listed_and_what_is_dropped_is_made_anew():
    calls.clear()
    for _ in range(2):
        counted(number=1)
    cache = flytekit_compat.local_cache()
    (key,) = [key for key in cache if "test_flytekit.counted" in key]
    assert b"o0" in cache[key]
    del cache[key]
    counted(number=1)
    assert calls == [1, 1]


def test_a_cache_hit_is_told_with_the_outputs_once(monkeypatch):
    monkeypatch.setattr(LocalTaskCache, "get", LocalTaskCache.get)  # put back afterwards
    told: list[Any] = []
    for _ in range(2):
        flytekit_compat.on_cache_hit(told.append)
    for _ in range(2):
        counted(number=3)
    assert [outputs["o0"].scalar.primitive.integer for outputs in told] == [3]


def test_metadata_of_a_task_hold_while_the_block_runs():
    calls.clear()
    registered = counted.metadata
    with flytekit_compat.replaced_metadata(counted, replace(registered, cache=False)):
        for _ in range(2):
            counted(number=2)
    for _ in range(2):
        counted(number=2)
    assert calls == [2, 2, 2]
    assert counted.metadata is registered


def test_a_checkpoint_tells_where_it_goes_and_where_the_one_before_is(tmp_path):
    (tmp_path / "mine").write_text("saved")
    for name in ("new", "old"):
        (tmp_path / name).mkdir()
    checkpoint = SyncCheckpoint(str(tmp_path / "new"), str(tmp_path / "old"))
    checkpoint.save(tmp_path / "mine")
    assert Path(flytekit_compat.checkpoint_destination(checkpoint), "mine").read_text() == "saved"
    assert flytekit_compat.checkpoint_source(checkpoint) == str(tmp_path / "old")
    assert flytekit_compat.checkpoint_source(SyncCheckpoint(str(tmp_path / "new"))) is None


def test_html_of_a_deck_is_replaced():
    deck = Deck("Training", "first")
    flytekit_compat.replace_html(deck, "second")
    assert deck.html == "second"


@pytest.mark.parametrize(
    ("own", "other"), [(TaskError, FlyteUserRuntimeException), (TaskInterruptedError, FlyteRecoverableException)]
)
def test_an_exception_goes_by_the_error_code_of_another(own, other):
    error = own(to_failure(platform, ValueError("reason")), "reason")
    assert own.error_code == FlyteUserRuntimeException(error).error_code == other.error_code
