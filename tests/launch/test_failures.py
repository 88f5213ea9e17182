"""What an error of torch, CUDA or NCCL is taken for, by its type and message."""

import dataclasses
import json
import re
import signal
from typing import Any

import pytest
import torch
from torch import distributed

from flyte_ddp.errors import DownloadError, InputError, RecoverableError, WrongBitsError
from flyte_ddp.launch import failures
from flyte_ddp.launch.environment import host_name
from flyte_ddp.launch.failures import from_exception, from_exit_code, name_the_cause

# As torch appends it to every error of CUDA
ADVICE = """
CUDA kernel errors might be asynchronously reported at some other API call, so the stacktrace below might be incorrect.
For debugging consider passing CUDA_LAUNCH_BLOCKING=1
Compile with `TORCH_USE_CUDA_DSA` to enable device-side assertions.
"""
NCCL = "NCCL error in: ProcessGroupNCCL.cpp:3690, {} (run with NCCL_DEBUG=WARN for details), NCCL version 2.28.9\n{}"


def cuda(message):
    return torch.AcceleratorError(f"CUDA error: {message}{ADVICE}")


def nccl(what, last):
    return distributed.DistBackendError(NCCL.format(what, last))


@pytest.mark.parametrize(
    ("error", "kind", "recoverable", "says"),
    [
        (cuda("uncorrectable ECC error encountered"), "error", True, "ECC"),
        (cuda("unspecified launch failure"), "error", True, "launch failure"),
        (cuda("Invalid access of peer GPU memory over nvlink or a hardware error"), "error", True, "nvlink"),
        (cuda("CUDA-capable device(s) is/are busy or unavailable"), "error", True, "busy"),
        (torch.AcceleratorError("NVRM: Xid (PCI:0000:3b:00): 79, GPU has fallen off the bus."), "error", True, "Xid"),
        (RuntimeError("CUDA error: uncorrectable ECC error encountered" + ADVICE), "error", True, "ECC"),
        (nccl("unhandled cuda error", "Cuda failure 214 'uncorrectable ECC error encountered'"), "error", True, "ECC"),
        (cuda("device-side assert triggered"), "error", False, "assert triggered"),
        (cuda("an illegal memory access was encountered"), "error", False, "illegal"),
        (cuda("no kernel image is available for execution on the device"), "error", False, "no kernel image"),
        (cuda("out of memory"), "error", False, "lower batch_size, or train on more GPUs; where model() fails, the"),
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB"), "error", False, "lower batch_size"),
        (nccl("unhandled cuda error", "Cuda failure 2 'out of memory'"), "error", False, "lower batch_size"),
        (
            nccl("invalid usage", "Duplicate GPU detected : rank 1 and rank 0 both on CUDA device 1b000"),
            "error",
            False,
            'backend to "gloo"',
        ),
        (nccl("remote process exited or there was a network error", "socket closed"), "peer", True, "socket closed"),
        (RuntimeError("[../gloo/transport/tcp/pair.cc:534] Connection closed by peer"), "peer", True, "gloo"),
        (RuntimeError("DataLoader worker (pid 7) is killed by signal: Killed."), "error", True, "lower loader_workers"),
        (RuntimeError("DataLoader timed out after 60 seconds"), "error", True, "raise its timeout"),
        (RuntimeError("my own hardware error"), "error", False, "my own"),
        (RuntimeError("no igloo has a corner"), "error", False, "igloo"),
        (ValueError("NCCL, ECC, out of memory"), "error", False, "NCCL"),
        (InputError("batch_size"), "input", False, "batch_size"),
        (DownloadError("no mirror"), "error", True, "no mirror"),
    ],
)
def test_errors_are_sorted_by_type_and_message(error, kind, recoverable, says):
    failure = from_exception(error, 1, "host")
    assert (failure.kind, failure.recoverable) == (kind, recoverable)
    assert says in failure.message
    assert failure.message.startswith(str(error))


LOST = "NVRM: Xid (PCI:0000:3b:00): {}, GPU has failed"


@pytest.mark.parametrize(
    ("error", "bad_nodes"),
    [
        (cuda("uncorrectable ECC error encountered"), ("node-a",)),
        (nccl("unhandled cuda error", "Cuda failure 214 'uncorrectable ECC error encountered'"), ("node-a",)),
        (torch.AcceleratorError(LOST.format(79)), ("node-a",)),
        (torch.AcceleratorError(LOST.format(31)), ()),
        (cuda("unspecified launch failure"), ()),
        (cuda("CUDA-capable device(s) is/are busy or unavailable"), ()),
        (nccl("remote process exited or there was a network error", "socket closed"), ()),
        (RuntimeError("DataLoader worker (pid 7) is killed by signal: uncorrectable"), ()),
        (ValueError("NCCL, ECC, out of memory"), ()),
        (RecoverableError("odd"), ()),
        (WrongBitsError(0, 3, "wrong", ["node-b", "node-c"]), ("node-b", "node-c")),
        (InputError("uncorrectable ECC"), ()),
    ],
)
def test_only_broken_hardware_is_blamed_on_a_node_and_only_where_pods_know_its_name(monkeypatch, error, bad_nodes):
    assert from_exception(error, 1, "pod-1").bad_nodes == ()
    monkeypatch.setenv("DDP_NODE_NAME", "node-a")
    failure = from_exception(error, 1, host_name())
    assert failure.bad_nodes == bad_nodes
    line = f"register with DDP_AVOID_HOSTS={','.join(bad_nodes)}"
    assert str(failure).splitlines()[0].endswith(line) == bool(bad_nodes)
    assert failures.Failure(**json.loads(json.dumps(dataclasses.asdict(failure)))) == failure


class Unspeakable(Exception):
    def __str__(self):
        raise TypeError


def test_any_exception_and_any_signal_becomes_a_failure():
    failure = from_exception(Unspeakable(), 1, "host")
    assert str(failure).startswith("rank 1 on host: Unspeakable: its message cannot be shown: __str__ raises TypeError")
    assert not failure.recoverable
    str(from_exception(ValueError("no file \udce4.png"), 1, "host")).encode()
    assert from_exit_code(-40, 1, "host").cause == "signal 40"


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (AssertionError(), "AssertionError"),
        (ImportError("\n\nAutoModel needs\n a library\n"), "ImportError: AutoModel needs"),
    ],
)
def test_the_first_line_says_what_there_is_to_say(error, said):
    for rank, where in ((1, "rank 1 on host: "), (None, "")):
        assert str(from_exception(error, rank, "host")).splitlines()[0] == where + said


def test_what_the_caller_can_fix_is_raised_as_such():
    raised = name_the_cause([from_exception(InputError("lower it"), 1, "host")])
    assert isinstance(raised, InputError)
    assert raised.message == "lower it"


def test_a_traceback_follows_what_no_message_of_ours_explains():
    assert from_exception(InputError("init must fit the network"), 1, "host").details == ""
    assert "LookupError: no such word" in from_exception(LookupError("no such word"), 1, "host").details


def calling(file):
    """A function that calls the next one, from a file of the library."""
    code: dict[str, Any] = {}
    exec(compile("def call(function, *others): function(*others)", str(failures.ROOT / file), "exec"), code)
    return code["call"]


def files_shown(*functions):
    """Of the traceback of a rank in which one calls the next."""
    with pytest.raises((LookupError, TypeError)) as caught:
        calling("launch/rank.py")(*functions)
    traceback = caught.value.__traceback__
    assert traceback
    caught.value.__traceback__ = traceback.tb_next  # without this function's own frame
    return re.findall(r"(\w+)\.py", from_exception(caught.value, 0, "host").details)


def test_a_traceback_begins_where_the_library_calls_what_is_not_its_own():
    def fail():
        raise LookupError("no such word")

    step, recipe = calling("engine/step.py"), calling("recipe.py")
    assert files_shown(step, step, fail) == ["step", "test_failures"]
    assert files_shown(step, recipe, step, fail) == ["step", "recipe", "step", "test_failures"]
    assert files_shown(step, step, None) == ["rank", "step", "step"], "all of what may be a fault of the library"


def test_the_cause_is_named_before_what_may_be_its_effect():
    lost = from_exception(nccl("remote process exited", ""), 0, "host")
    aborted = from_exit_code(-signal.SIGABRT, 1, "host")
    killed = from_exit_code(-signal.SIGKILL, 2, "host")
    assert str(name_the_cause([lost, aborted, killed])) == str(killed)
    assert str(name_the_cause([lost, aborted])) == str(aborted)
    assert "look at the others, and at your own calls of torch.distributed" in str(aborted)
