"""Rows on single operations, without a training: all of them are computed by one rank, see cases.py."""

import json
from collections.abc import Callable

from benchmarks.gpu_rows.row import Machine, Missing, Row, expect
from flyte_ddp.launch import launcher
from flyte_ddp.launch.failures import RankError

CASES = {
    "random numbers by position": "computing:numbers",
    "products and convolutions in IEEE's float32": "computing:ieee",
    "operations that add up, in the same order": "computing:deterministic",
    "rounding is not taken for coupling": "computing:close_enough",
    "rows of all types are exchanged": "computing:exchanged",
    "what hosts are compared by": "computing:compared",
}
Outcomes = dict[str, tuple[str, str]]
_found: dict[str, Outcomes] = {}  # by the machine's folder


def case(name: str) -> Callable[[Machine], str]:
    def check(machine: Machine) -> str:
        place = str(machine.place)
        if place not in _found:
            _found[place] = outcomes(machine)
        mark, result = _found[place][name]
        if mark == "left out":
            raise Missing(result)
        expect(mark == "passed", result)
        return result

    return check


def outcomes(machine: Machine) -> Outcomes:
    """Of all cases; a rank that ends goes on in another one, after the case that has ended it."""
    path, world = machine.place / "cases.jsonl", machine.world(1, "nccl" if machine.gpus else "gloo")
    names = [f"benchmarks.gpu_rows.{name}" for name in CASES.values()]
    found: Outcomes = {}
    while rest := [name for name in names if name not in found]:
        problem = "its process ended without a word"
        try:
            launcher.launch("benchmarks.gpu_rows.cases:run", world, (rest, str(path)), 120, lambda event: None)
        except RankError as failed:
            problem = f"{failed.failure.cause}: {failed.failure.message}".replace("\n", " ")[:400]
        lines = path.read_text().splitlines() if path.exists() else []
        before = len(found)
        found.update({name: (mark, result) for name, mark, result, _ in map(json.loads, lines)})
        if len(found) == before:
            found[rest[0]] = "FAILED", problem
    return {name.removeprefix("benchmarks.gpu_rows."): outcome for name, outcome in found.items()}


ROWS = [Row(title, case(name)) for title, name in CASES.items()]
