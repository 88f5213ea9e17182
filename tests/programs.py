"""Programs in processes that are forked where torch is imported, in place of `python FILE`, which would import it."""

import io
import os
import runpy
import sys
import traceback
from collections.abc import Mapping, Sequence
from contextlib import redirect_stdout
from pathlib import Path
from typing import NamedTuple
from unittest.mock import patch

from flyte_ddp.launch import launcher
from flyte_ddp.launch.environment import Environment, World
from flyte_ddp.launch.link import Link

PATIENCE_SECONDS = 240.0


class Said(NamedTuple):
    printed: str  # by Python, on standard output
    error: str  # that has ended it, if one did


class Program(NamedTuple):
    file: Path
    arguments: tuple[str, ...]
    variables: Mapping[str, str]


def run_program(file: Path, *arguments: str) -> Said:
    """As `python FILE ARGUMENT …`."""
    return run_together(launcher.ALONE, [Program(file, arguments, {})])[0]


def run_on_two_nodes(file: Path, port: int, *arguments: str, nodes: Sequence[Mapping[str, str]]) -> list[Said]:
    """As the processes that torchrun starts for one rank on each of two nodes, which have these variables and a core.

    An exception that ends one of them does not end the other.
    """
    torchruns = {"WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1"}
    torchruns["MASTER_PORT"] = str(port)
    given = [
        Program(file, arguments, {**torchruns, "RANK": str(rank), "GROUP_RANK": str(rank), **variables})
        for rank, variables in enumerate(nodes)
    ]
    return run_together(World(size=2, local_size=2, backend="gloo", device="cpu"), given)


def run_together(world: World, programs: list[Program]) -> list[Said]:
    said: list[Said] = launcher.launch(f"{__name__}:run_rank", world, programs, PATIENCE_SECONDS, lambda event: None)
    return said


def run_rank(environment: Environment, link: Link, programs: list[Program]) -> Said:
    file, arguments, variables = programs[environment.rank]
    os.environ.update(variables)
    if len(programs) > 1:
        cores = sorted(os.sched_getaffinity(0))
        os.sched_setaffinity(0, [cores[environment.rank % len(cores)]])
    error, own = "", os.getpid()
    with redirect_stdout(io.StringIO()) as printed, patch.object(sys, "argv", [str(file), *arguments]):
        try:
            runpy.run_path(str(file), run_name="__main__")
        except BaseException as raised:
            if os.getpid() != own:  # a process that the program has forked, and that must not go on as this rank
                traceback.print_exc(file=sys.__stderr__)
                os._exit(1)
            if not isinstance(raised, Exception):
                raise
            error = f"{type(raised).__name__}: {raised}"
    return Said(printed.getvalue(), error)
