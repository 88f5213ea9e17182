"""pyflyte, in processes of its own and in the test's, and what tests of commands need besides."""

import io
import os
import random
import re
import runpy
import shlex
import socket
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, redirect_stderr, redirect_stdout, suppress
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
from click.testing import CliRunner
from flytekit.clis.sdk_in_container.pyflyte import main
from flytekit.core.local_cache import LocalTaskCache

ROOT = Path(__file__).resolve().parents[1]
# A proxy that refuses all connections: no mirror can be reached, on any machine
OFFLINE = dict.fromkeys(("http_proxy", "https_proxy", "HTTP_PROXY", "HTTPS_PROXY"), "http://127.0.0.1:9")

Done = subprocess.CompletedProcess


def pyflyte(*arguments: str, status: int = 0, cwd: Path = ROOT, environment: Mapping[str, str] = {}) -> "Done[str]":
    """`pyflyte run` in the test's own process, which has imported flytekit and torch; fails if it ends otherwise.

    What is read while modules are imported, like the settings of a registration, needs a process of its own.
    """
    # Afterwards as it was: --overwrite-cache and --env set variables, which every later command would have, too
    with patch.dict(os.environ, environment), pytest.MonkeyPatch.context() as here:
        here.chdir(cwd)
        # Opened anew, in the home folder of this call, and afterwards as it was
        here.setattr(LocalTaskCache, "_initialized", False)
        here.setattr(LocalTaskCache, "_cache", None, raising=False)
        done = CliRunner().invoke(main, ["run", *arguments])
    return _checked(Done(arguments, done.exit_code, done.stdout, done.stderr), status)


def typed(command: str, cwd: Path, environment: Mapping[str, str] = {}) -> "Done[str]":
    """Lines for a shell in this folder; fails if they do. A single `pyflyte run` is one in the test's process."""
    if command.startswith("pyflyte run ") and "\n" not in command.strip():
        with _importing_from(cwd):
            return pyflyte(*shlex.split(command)[2:], cwd=cwd, environment=environment)
    environment = {**os.environ, **environment}
    done = subprocess.run(
        ["bash", "-ec", command], cwd=cwd, env=environment, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done


def python(file: str, cwd: Path) -> "Done[str]":
    """`python FILE` in the test's own process, whose ranks have imported most of what they need."""
    with _importing_from(cwd), pytest.MonkeyPatch.context() as here:
        here.chdir(cwd)
        with redirect_stdout(io.StringIO()) as out, redirect_stderr(io.StringIO()) as err:
            runpy.run_path(str(cwd / file), run_name="__main__")
    return Done(file, 0, out.getvalue(), err.getvalue())


@contextmanager
def _importing_from(folder: Path) -> Iterator[None]:
    """As if Python had been started there; afterwards, what was imported from the folder is forgotten."""
    before = {*sys.modules}
    with pytest.MonkeyPatch.context() as here:
        here.setattr(sys, "path", [str(folder), *sys.path])
        try:
            yield
        finally:
            for name in {*sys.modules} - before:
                if (getattr(sys.modules[name], "__file__", None) or "").startswith(str(folder)):
                    del sys.modules[name]


def pyflyte_process(
    *arguments: str, status: int = 0, cwd: Path = ROOT, environment: Mapping[str, str] = {}
) -> "Done[str]":
    """`pyflyte run` as a user types it; fails if it ends otherwise."""
    command, environment = ["pyflyte", "run", *arguments], {**os.environ, **environment}
    return _checked(
        subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True, timeout=300), status
    )


def _checked(done: "Done[str]", status: int) -> "Done[str]":
    assert done.returncode == status, done.stdout + done.stderr
    assert "Traceback" not in done.stderr
    return done


def start_pyflyte(*arguments: str, cwd: Path = ROOT) -> "subprocess.Popen[str]":
    """`pyflyte run` as a user types it, for tests that end it on the way; its log can be read meanwhile."""
    return subprocess.Popen(
        ["pyflyte", "run", *arguments], cwd=cwd, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True,
        start_new_session=True,
    )  # fmt: skip


def words(text: str) -> str:
    """Without the frame that rich draws around an error, and without its line breaks."""
    return " ".join(re.sub("[│╭╮╰╯─]", " ", text).split())


def output(done: "Done[str]", name: str) -> str:
    """The first field of this name in a workflow's outputs."""
    return re.findall(rf"\b{name}='?([^,')]+)", done.stdout)[0]


def free_port() -> int:
    """Finds a port below those that the kernel gives to connections, so that none takes it before a server does."""
    for port in random.SystemRandom().sample(range(20_000, 32_000), 100):
        with socket.socket() as probe, suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port
    raise RuntimeError("100 ports between 20000 and 32000 are all taken")


def same(ours: Mapping[str, torch.Tensor], others: Mapping[str, torch.Tensor]) -> bool:
    """Whether two models have the same bits."""
    return ours.keys() == others.keys() and all(torch.equal(ours[name], others[name]) for name in ours)


@contextmanager
def unreadable(path: Path, allowed: int = 0) -> Iterator[None]:
    """While the block runs, which as root runs as somebody else, the file or folder has this mode: may not be read."""
    mode, user = path.stat().st_mode, os.geteuid()
    path.chmod(allowed)
    try:
        if user == 0:  # root may read everything
            os.seteuid(65534)
        yield
    finally:
        os.seteuid(user)
        path.chmod(mode)
