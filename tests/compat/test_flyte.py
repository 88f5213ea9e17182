"""The private parts of Flyte 2's SDK that we use exist, and do what they are used for."""

import asyncio
from dataclasses import dataclass

import flyte
import msgpack
import pytest
from flyte._persistence._db import LocalDB
from flyte.cli._params import JsonParamType
from flyte.errors import NonRecoverableError
from flyte.types import TypeEngine
from flyteidl2.core.literals_pb2 import Binary, Literal, LiteralMap, Scalar

from flyte_ddp.flyte2 import flyte_compat
from flyte_ddp.flyte2.inputs import set_up_flyte
from flyte_ddp.recipes.hyperparameters import Hyperparameters


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


@pytest.mark.parametrize(
    ("values", "says"),
    [
        ({"epochz": 1}, 'Hyperparameters has no field "epochz" (did you mean epochs?)'),
        ({"epochs": "two"}, 'Hyperparameters.epochs must be a whole number, got "two"'),
        ({"epochs": 2.5}, "Hyperparameters.epochs must be a whole number, got 2.5"),
    ],
)
@pytest.mark.parametrize("form", ["msgpack", "struct"])
def test_a_wrong_input_that_did_not_come_by_the_command_line_is_refused(values, says, form):
    """As a pod reads it, in the two forms of the console."""
    set_up_flyte()
    scalar = Scalar(binary=Binary(value=msgpack.dumps(values), tag="msgpack"))
    if form == "struct":
        scalar = Scalar()
        scalar.generic.update(values)
    inputs = LiteralMap(literals={"hp": Literal(scalar=scalar)})
    with pytest.raises(NonRecoverableError) as error:
        asyncio.run(TypeEngine.literal_map_to_kwargs(inputs, {"hp": Hyperparameters}))
    assert says in str(error.value)
    assert len(str(error.value).splitlines()) == 1


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
