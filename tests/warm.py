"""A Python that has imported torch, once for all workers of a session: others fork in place of starting cold.

What runs is the real program, in a process of its own, with its arguments, folder, variables, files and exit status.
"""

import atexit
import fcntl
import gc
import importlib
import json
import multiprocessing
import os
import runpy
import select
import signal
import socket
import subprocess
import sys
import types
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from multiprocessing import resource_tracker
from pathlib import Path
from typing import Any

from flyte_ddp.launch.launcher import START_METHOD
from flyte_ddp.launch.signals import STOP_SIGNALS

ROOT = Path(__file__).resolve().parents[1]
IS_FORKING = START_METHOD == "forkserver"
STATUS = [0]  # of a program
ADDRESS, PRELOAD = "DDP_TEST_WARM", "DDP_TEST_PRELOAD"
# A file that can be executed; it ends as the process does that runs the program for it
SHIM = """#!{python} -IS
import json, os, signal, socket, sys
if sys.argv[1] in {cold}:
    os.execv({python!r}, [{python!r}, *sys.argv[1:]])
files = [int(file) for file in os.listdir("/proc/self/fd") if os.path.exists(f"/proc/self/fd/{{file}}")]
line = socket.socket(socket.AF_UNIX)
line.connect({address!r})
blocked = [int(number) for number in signal.pthread_sigmask(signal.SIG_BLOCK, [])]
asked = [[*{before}, *sys.argv[1:]], os.getcwd(), dict(os.environ), files, blocked]
socket.send_fds(line, [b" "], files)
line.sendall(json.dumps(asked).encode())
line.shutdown(socket.SHUT_WR)
status = int(line.recv(16))
if status < 0:
    os.kill(os.getpid(), -status)
sys.exit(status)
"""


@contextmanager
def warm_server(place: Path) -> Iterator[None]:
    """A server while the block runs, which others find by a variable; it imports nothing until it is asked to."""
    address, (end, lifeline) = str(place / "warm"), os.pipe()
    program = f"import sys; sys.path[0] = {str(ROOT)!r}; from tests.warm import serve; serve(*map(int, sys.argv[1:]))"
    with socket.socket(socket.AF_UNIX) as door:
        door.bind(address)
        door.listen(100)
        ours = [str(door.fileno()), str(end)]
        server = subprocess.Popen(
            [sys.executable, "-c", program, *ours],
            env={**os.environ, "PYTHONUNBUFFERED": ""},
            pass_fds=(door.fileno(), end),
        )
    os.close(end)
    os.environ[ADDRESS] = address
    try:
        yield
    finally:
        del os.environ[ADDRESS]
        os.close(lifeline)
        server.wait()


def write_shim(path: Path, before: Sequence[str] = (), cold: Sequence[str] = ()) -> str:
    """Writes a `python` that the server runs, with these arguments before its own."""
    address = os.environ[ADDRESS]
    path.write_text(SHIM.format(python=sys.executable, cold=[*cold], address=address, before=[*before]))
    path.chmod(0o755)
    return str(path)


@contextmanager
def warm_fork_server(folder: Path, modules: Sequence[str]) -> Iterator[None]:
    """While the block runs, multiprocessing's fork server is forked, with these modules."""
    if not IS_FORKING:
        yield
        return
    resource_tracker.ensure_running()  # cold
    shim = write_shim(folder / "fork-server")
    multiprocessing.set_executable(shim)
    os.environ[PRELOAD] = " ".join(modules)
    try:
        yield
    finally:
        del os.environ[PRELOAD]
        multiprocessing.set_executable(sys.executable)


@contextmanager
def warm_python(folder: Path, cold: Sequence[str] = ()) -> Iterator[dict[str, str]]:
    """Writes `python` and `torchrun` into the folder; yields the variables by which others find them.

    cold: the scripts that `python` starts as always.
    """
    folder.mkdir(parents=True)
    if not IS_FORKING:
        yield {}
        return
    python = write_shim(folder / "python", cold=cold)
    write_shim(folder / "torchrun", before=["-m", "torch.distributed.run"])
    yield {"PATH": f"{folder}{os.pathsep}{os.environ['PATH']}", "PYTHON_EXEC": python}


def serve(door_file: int, lifeline: int) -> None:
    """Forks a process for each program that a shim asks for, as long as the session lives."""
    atexit.register(leave)
    ours = {*map(os.path.abspath, filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))), str(ROOT)}
    installed = [path for path in sys.path if path not in ours]
    signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)  # as in a fork server: each program has its shim's
    door = socket.socket(fileno=door_file)
    while True:
        if lifeline in select.select([door.fileno(), lifeline], [], [])[0]:
            os._exit(0)
        line = door.accept()[0]
        files = socket.recv_fds(line, 1, 200)[1]
        with suppress(ValueError):  # the shim has been killed
            asked = json.load(line.makefile())
            modules = asked[2].pop(PRELOAD, "").split()
            os.environ.update(asked[2] if modules else {})  # which they may read
            for module in modules:
                with suppress(ImportError):  # as a fork server
                    importlib.import_module(module)
            if not os.fork():
                break
        line.close()
        for file in files:
            os.close(file)
        with suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
    door.close()
    os.close(lifeline)
    if program := os.fork():
        for file in files:
            os.close(file)
        watch(program, line)
    line.close()
    run(files, installed, *asked)


def watch(program: int, line: socket.socket) -> None:
    """Tells the shim how the program has ended; the program ends with the shim."""
    waiting, ended = select.poll(), os.pidfd_open(program)
    waiting.register(ended, select.POLLIN)
    waiting.register(line, 0)
    if ended not in dict(waiting.poll()):
        os.kill(program, signal.SIGKILL)
    status = os.waitstatus_to_exitcode(os.waitpid(program, 0)[1])
    with suppress(OSError):
        line.sendall(str(status).encode())
    os._exit(0)


def run(
    files: Sequence[int],
    installed: Sequence[str],
    arguments: list[str],
    folder: str,
    variables: dict[str, str],
    numbers: Sequence[int],
    blocked: Sequence[int],
) -> None:
    """Runs `python ARGUMENTS` as the main program of this process."""
    high = [fcntl.fcntl(file, fcntl.F_DUPFD, 500) for file in files]  # where none of the numbers is
    for file in files:
        os.close(file)
    for file, number in zip(high, numbers, strict=True):
        os.dup2(file, number)
        os.close(file)
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(variables)
    signal.pthread_sigmask(signal.SIG_SETMASK, blocked)
    given = [os.environ.get("PYTHONUNBUFFERED") and "-u"]
    while arguments[0][0] == "-" and arguments[0] not in ("-c", "-m"):
        given.append(arguments.pop(0))
        if given[-1] == "-X":
            arguments.pop(0)
    sys.stdout.reconfigure(line_buffering="-u" in given)  # type: ignore[union-attr]
    kind = arguments.pop(0) if arguments[0] in ("-c", "-m") else ""
    first = {"-c": "", "-m": folder}.get(kind, os.path.dirname(os.path.abspath(arguments[0])))
    variable = filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))
    sys.path[:] = [first, *map(os.path.abspath, variable), *installed]
    sys.argv = ["-c", *arguments[1:]] if kind == "-c" else arguments
    if kind == "-c":  # a fork server, some of whose ranks call what is registered
        atexit.unregister(leave)
        main: Any = types.ModuleType("__main__")
        sys.modules["__main__"] = main
        exec(arguments[0], main.__dict__)
        return
    atexit.unregister(os._exit)  # this and the garbage as in a rank
    gc.freeze()
    gc.enable()
    if "torch" in sys.modules and "OMP_NUM_THREADS" in os.environ:  # which torch has read as it was imported
        sys.modules["torch"].set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    STATUS[0] = 1
    try:
        if kind == "-m":
            runpy.run_module(arguments[0], run_name="__main__", alter_sys=True)
        else:
            runpy.run_path(arguments[0], run_name="__main__")
    except SystemExit as end:
        STATUS[0] = end.code if isinstance(end.code, int) else int(end.code is not None)
        raise
    STATUS[0] = 0


def leave() -> None:
    """Ends a program after all other exit handlers, and before what has been imported would tell of its leaks."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(STATUS[0])
