"""The private parts of Flyte 2's SDK that we use exist, and do what they are used for."""

from dataclasses import dataclass

import flyte
from flyte._persistence._db import LocalDB
from flyte.cli._params import JsonParamType

from flyte_ddp.flyte2 import flyte_compat


@dataclass
class Size:
    pixels: int

    @classmethod
    def from_dict(cls, values):
        return cls(**values)


class Smaller(Size):
    pass


def test_json_inputs_of_ours_are_read_by_us(monkeypatch):
    monkeypatch.setattr(JsonParamType, "convert", JsonParamType.convert)  # put back afterwards
    for read in (lambda text: {"pixels": 7}, lambda text: {"pixels": len(text)}):
        flyte_compat.read_json_inputs(Size, read)
    found = JsonParamType(Smaller).convert("as it comes", None, None)
    assert type(found) is Smaller
    assert found.pixels == len("as it comes")
    assert JsonParamType(dict).convert('{"pixels": 1}', None, None) == {"pixels": 1}


def test_entries_of_the_local_cache_can_be_listed_and_deleted(monkeypatch, tmp_path):
    monkeypatch.setenv("HOME", str(tmp_path))
    for name, value in {"_conn": None, "_conn_sync": None, "_initialized": False}.items():
        monkeypatch.setattr(LocalDB, name, value)  # another test may have opened it elsewhere
    with flyte_compat.local_cache() as cache:
        assert not cache.execute("SELECT * FROM task_cache").fetchall()
    assert not any(tmp_path.iterdir()), "a pod has no cache, and perhaps a home that it cannot write to"
    environment = flyte.TaskEnvironment("cached")

    @environment.task(cache=flyte.Cache("auto", version_override="1"))
    async def double(number: int) -> int:
        return 2 * number

    assert flyte.with_runcontext("local").run(double, number=4).outputs()[0] == 8
    with flyte_compat.local_cache() as cache:
        ((key, value),) = cache.execute("SELECT key, value FROM task_cache").fetchall()
        cache.execute("DELETE FROM task_cache WHERE key = ?", (key,))
    with flyte_compat.local_cache() as cache:
        assert value
        assert not cache.execute("SELECT * FROM task_cache").fetchall()
