"""Rows on single operations, without a training: one rank computes each."""

from collections.abc import Callable

from benchmarks.gpu_rows.row import Machine, Missing, Row
from flyte_ddp.launch import launcher

CASES = {
    "random numbers by position": "numbers",
    "products and convolutions in IEEE's float32": "ieee",
    "operations that add up, in the same order": "deterministic",
    "rounding is not taken for coupling": "close_enough",
    "rows of all types are exchanged": "exchanged",
    "what hosts are compared by": "compared",
}


def case(name: str) -> Callable[[Machine], str]:
    def check(machine: Machine) -> str:
        world = machine.world(1, "nccl" if machine.gpus else "gloo")
        ((has_run, result),) = launcher.launch(
            "benchmarks.gpu_rows.computing:run", world, name, 120, lambda event: None
        )
        if not has_run:
            raise Missing(result)
        return str(result)

    return check


ROWS = [Row(title, case(name)) for title, name in CASES.items()]
