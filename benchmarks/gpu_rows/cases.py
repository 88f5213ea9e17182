"""Runs cases, one after the other, in a single rank: starting CUDA takes longer than most of them."""

import json
import pkgutil
import time
from typing import Any

import torch

from benchmarks.gpu_rows.row import Missing
from flyte_ddp.engine.arithmetic import settle_arithmetic
from flyte_ddp.launch.environment import Environment
from flyte_ddp.launch.link import Link
from flyte_ddp.launch.process_group import process_group


def run(environment: Environment, link: Link, argument: tuple[list[str], str]) -> None:
    """Appends a line for each case, "module:function", to a file: its name, its mark, what it has found, its seconds.

    Ends with the first error of the device, after which nothing else works in this process.
    """
    names, path = argument
    settle_arithmetic()
    with process_group(environment, 120) as device, open(path, "a") as file:
        for name in names:
            link.heartbeat()
            started, error = time.perf_counter(), None
            try:
                outcome = "passed", pkgutil.resolve_name(name)(device)
                if device.type == "cuda":
                    torch.cuda.synchronize()
            except Missing as missing:
                outcome = "left out", str(missing)
            except Exception as caught:  # whatever it is, the others still run
                error, outcome = caught, ("FAILED", f"{type(caught).__name__}: {caught}".replace("\n", " ")[:400])
            line: list[Any] = [name, *outcome, time.perf_counter() - started]
            print(json.dumps(line), file=file, flush=True)
            if isinstance(error, torch.AcceleratorError):
                return
