"""Failures of ranks: which rank failed, why, and whether trying again can help. Imports no torch."""

import math
import os
import re
import signal
import time
import traceback
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from flyte_ddp.errors import InputError, RecoverableError, ReportedError
from flyte_ddp.launch.environment import NODE_VARIABLE
from flyte_ddp.text import encodable, masked

ROOT = Path(__file__).parent.parent
# Errors of a rank whose peer is gone or does not answer: these are effects, never causes
PEER_ERRORS = {"DistBackendError", "DistNetworkError", "DistStoreError", "DistError", "DistQueueEmptyError"}
PEER_MESSAGE = re.compile(
    r"\b(gloo|NCCL)\b|connection (closed|reset|refused)|broken pipe|timed out (after|waiting)|wait timeout",
    re.IGNORECASE,
)
# Messages of CUDA, which NCCL repeats, about broken hardware, or a fault that may not recur
HARDWARE_MESSAGE = re.compile(
    r"\bECC\b|\bXid\b|uncorrectable|unspecified launch failure|launch timed out|hardware error|NVLink error"
    r"|CUDA error: unknown error|busy or unavailable|fallen off the bus|GPU is lost|system not yet initialized",
    re.IGNORECASE,
)
# Those of them that broken hardware alone causes: a program's own mistakes have the Xid 13, 31, 43 or 45
BROKEN_MESSAGE = re.compile(
    r"\bECC\b|uncorrectable|NVLink error|fallen off the bus|GPU is lost|\bXid \(.*?\): (?!(13|31|43|45)\b)\d",
    re.IGNORECASE,
)
MEMORY_MESSAGE = re.compile(r"out of memory|can't allocate memory|_ALLOC_FAILED")
# Mistakes that the next attempt would repeat, although NCCL reports them like the loss of a peer
SETUP_MESSAGE = re.compile(r"Duplicate GPU|no kernel image|invalid device ordinal")
MORE_MEMORY = " (lower batch_size, or train on more GPUs; where model() fails, the network itself is too large)"
LESS_LOADING = " (out of memory, or of shared memory? lower loader_workers or batch_size)"
MORE_TIME = " (its workers are too slow, or hang: raise its timeout)"
# Messages about shared memory, which semaphores of processes and torch's tensors between processes need
SHARED_MESSAGE = re.compile(r"shared memory (object|file)|</?torch_\d|bus error .*shared memory")
NO_SHARED_MEMORY = (
    " (processes of a rank share /dev/shm, which is full or read-only: give the container more, by docker's --shm-size "
    "or an emptyDir of medium Memory, or set loader_workers, or a loader's num_workers, to 0)"
)
OTHER_RANKS = ' (under nccl each rank needs a GPU of its own: lower the number of ranks, or set backend to "gloo")'
EFFECTS = ("aborted", "peer")  # kinds of failure that another rank may have caused; the last one more likely
LOSSES = ("killed", *EFFECTS)  # without errors of the ranks' code, and of a device: another pod has another device


@dataclass(frozen=True)
class Failure:
    """The failure of one rank, or of the process that starts the ranks; str() is what the user reads.

    Passwords in message and details are masked.

    Attributes:
        rank: the rank; None for the process that starts the ranks.
        host: the name of the rank's host; several, with commas, if the others are on other hosts.
        kind: "input" (an InputError), "error" (another exception of its own), "killed" (by a signal), "hang", "aborted"
            (by native code, perhaps because it lost another rank), or "peer" (it lost another rank).
        cause: the exception's type, or the signal's name.
        message: what has happened, in one sentence.
        details: the traceback, or the stacks of a hang; empty if the message says everything.
        recoverable: whether another attempt may succeed.
        others: ranks that hang like this one.
        at: the time of the failure, in seconds since 1970.
        bad_nodes: the nodes whose hardware is surely to blame; empty if the pods don't know the names of their nodes.
    """

    rank: int | None
    host: str
    kind: str
    cause: str
    message: str
    details: str = ""
    recoverable: bool = True
    others: tuple[int, ...] = ()
    at: float = field(default_factory=time.time)
    bad_nodes: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        for name in ("others", "bad_nodes"):  # a failure that was JSON has lists
            object.__setattr__(self, name, tuple(getattr(self, name)))
        for name in ("message", "details"):
            object.__setattr__(self, name, masked(getattr(self, name)))

    @property
    def is_effect(self) -> bool:
        """Whether another rank may be the cause."""
        return self.kind in EFFECTS

    def __str__(self) -> str:
        ranks = ", ".join(map(str, (self.rank, *self.others)))
        said = f"{self.cause}: {self.message}" if self.message else self.cause
        headline = f"rank{'s' if self.others else ''} {ranks} on {self.host}: {said}"
        if self.rank is None:
            headline = said if self.details else self.message
        if self.bad_nodes:
            first, newline, advice = headline.partition("\n")  # CUDA's messages have several lines
            headline = f"{first}; {how_to_avoid(self.bad_nodes)}{newline}{advice}"
        return f"{headline}\n\n{self.details}" if self.details else headline


def how_to_avoid(nodes: Iterable[str]) -> str:
    """Return a clause on how to keep later pods away from these nodes, for messages."""
    return f"to keep new pods away from there, register with DDP_AVOID_HOSTS={','.join(nodes)}"


class RankError(ReportedError):
    """The end of a training by the failure of one rank. Trying again would end the same way."""

    def __init__(self, failure: Failure):
        super().__init__(str(failure))
        self.failure = failure


class RecoverableRankError(RankError, RecoverableError):
    """The end of a training by the failure of one rank, for a reason that may not recur."""


class PreemptedError(RecoverableError):
    """The end of a process by a SIGTERM. It has written a checkpoint if that was possible.

    Attributes:
        until: the time, as of time.monotonic(), until which the checkpoint may be uploaded.
    """

    def __init__(self, message: str, until: float = math.inf):
        super().__init__(message)
        self.until = until


def from_exception(error: BaseException, rank: int | None, host: str) -> Failure:
    """Return the failure for an exception that ended a rank, or the process that starts the ranks.

    The failure's kind is "input" for an InputError, "peer" if the exception says that another rank was lost, else
    "error". It is recoverable if another attempt may succeed: after a RecoverableError, the loss of a rank, or a fault
    of hardware. Its message is the exception's, with a remedy where torch's message has none. Its details are the
    traceback; they are empty for an InputError or ReportedError, whose messages say everything. Its bad_nodes are the
    nodes whose hardware is surely to blame; empty if pods don't know the names of their nodes.

    Args:
        error: the exception.
        rank: the rank; None for the process that starts the ranks.
        host: the name of the host.
    """
    kind, recoverable, remedy = _classify(error)
    says_everything = isinstance(error, (InputError, ReportedError))
    return Failure(
        rank=rank,
        host=host,
        kind=kind,
        cause=type(error).__name__,
        message=describe_error(error) + remedy,
        details="" if says_everything else encodable(_format_traceback(error)),
        recoverable=recoverable,
        bad_nodes=_find_bad_nodes(error, host, kind == "error" and recoverable and not remedy),
    )


def _find_bad_nodes(error: BaseException, host: str, may_be_hardware: bool) -> tuple[str, ...]:
    """Return the nodes whose hardware is surely to blame for an error; none if pods don't know their nodes' names."""
    if not os.environ.get(NODE_VARIABLE):
        return ()
    if isinstance(error, RecoverableError):
        return error.bad_hosts
    return (host,) if may_be_hardware and BROKEN_MESSAGE.search(describe_error(error)) else ()


def _format_traceback(error: BaseException) -> str:
    """Format an error's traceback, without the frames of launch/, engine/ and script/ at its start.

    The last of these frames stays, to show what called the user's code, torch, or another part of this library. If the
    traceback has no other frames, all stay. The tracebacks of the error's causes stay whole.
    """
    own = (f"{ROOT}/launch/", f"{ROOT}/engine/", f"{ROOT}/script/")
    caller = error.__traceback__
    while caller and caller.tb_next and caller.tb_next.tb_frame.f_code.co_filename.startswith(own):
        caller = caller.tb_next
    is_own = caller is None or caller.tb_next is None
    return "".join(traceback.format_exception(type(error), error, error.__traceback__ if is_own else caller))


def describe_error(error: BaseException) -> str:
    """Return the exception's message, without passwords and leading whitespace, even if its own __str__ fails."""
    try:
        return masked(encodable(str(error))).lstrip()
    except Exception as problem:
        return f"its message cannot be shown: __str__ raises {type(problem).__name__}"


def _classify(error: BaseException) -> tuple[str, bool, str]:
    """Return the kind of failure that an error is, whether another attempt may succeed, and a remedy for the message.

    The kind is "input" for an InputError, "peer" if another rank was lost, else "error". The remedy is a text to append
    to the error's message; it may be empty. All three follow from the error's type, or from its message where torch has
    just one type for many faults.
    """
    message = describe_error(error)
    types = {base.__name__ for base in type(error).__mro__}
    is_plain = type(error) is RuntimeError
    if isinstance(error, InputError):
        return "input", False, ""
    if _is_semaphore(error) or (is_plain and SHARED_MESSAGE.search(message)):
        return "error", False, NO_SHARED_MEMORY
    if not (is_plain or types & {"AcceleratorError", "OutOfMemoryError", *PEER_ERRORS}):
        return "error", isinstance(error, RecoverableError), ""
    if is_plain and message.startswith("DataLoader worker"):
        return "error", True, LESS_LOADING
    if is_plain and message.startswith("DataLoader timed out"):
        return "error", True, MORE_TIME
    if is_out_of_memory(error):
        return "error", False, MORE_MEMORY
    if SETUP_MESSAGE.search(message):
        return "error", False, OTHER_RANKS if "Duplicate GPU" in message else ""
    if HARDWARE_MESSAGE.search(message) and ("CUDA" in message or not is_plain):
        return "error", True, ""
    if types & PEER_ERRORS or (is_plain and PEER_MESSAGE.search(message)):
        return "peer", True, ""
    return "error", False, ""


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether memory was too short, for Python, NumPy, torch, or a library below torch, such as cuBLAS."""
    types = {base.__name__ for base in type(error).__mro__}
    is_plain = "RuntimeError" in types and MEMORY_MESSAGE.search(describe_error(error))
    return bool(types & {"MemoryError", "OutOfMemoryError"} or is_plain)


def _is_semaphore(error: BaseException) -> bool:
    """Return whether the operating system has refused a semaphore, which only the traceback tells."""
    frames = traceback.extract_tb(error.__traceback__)
    return (
        isinstance(error, OSError) and bool(frames) and frames[-1].filename.endswith("multiprocessing/synchronize.py")
    )


HINTS = {
    "SIGKILL": ("killed", "probably out of memory"),
    # NCCL's watchdog ends a rank by this signal, without an exception
    "SIGABRT": (
        "aborted",
        (
            "ended by native code, as NCCL or gloo end a rank that has lost another, or exchanges a tensor of another "
            "size than the others: look at the others, and at your own calls of torch.distributed"
        ),
    ),
}


def from_exit_code(code: int, rank: int, host: str, peak_bytes: int = 0) -> Failure:
    """Return the failure of a rank that ended without a report: by a signal, or by a call of os._exit.

    The failure is always recoverable. Its kind is "killed", also after os._exit, or "aborted" for SIGABRT, by which
    NCCL or gloo ends a rank that has lost another.

    Args:
        code: the exit status, or -N if signal N ended the rank.
        rank: the rank.
        host: the name of the rank's host.
        peak_bytes: the most memory that the rank is known to have used; 0 if unknown.
    """
    memory = f"; peak memory {peak_bytes / 2**20:.0f} MiB" if peak_bytes else ""
    if code >= 0:
        return Failure(rank, host, "killed", f"exit status {code}", f"ended without a report{memory}")
    names = {number.value: number.name for number in signal.Signals}
    name = names.get(-code, f"signal {-code}")  # most real-time signals have no name
    kind, hint = HINTS.get(name, ("killed", "killed from outside, or a crash in native code"))
    return Failure(rank, host, kind, name, f"{hint}{memory}")


def name_the_cause(failures: Sequence[Failure]) -> InputError | RankError:
    """Return, without raising it, the exception for a failed run: that of the failure that caused the others.

    The cause is the earliest failure whose kind is neither "aborted" nor "peer", because another rank may have caused
    failures of these kinds. If all are of these kinds, the cause is the earliest "aborted" one, else the earliest
    "peer".

    Args:
        failures: the failures of the run's ranks, in any order; at least one.

    Returns:
        An InputError for kind "input"; else a RecoverableRankError if another attempt may succeed, or a RankError.
    """
    cause = min(failures, key=lambda failure: (EFFECTS.index(failure.kind) if failure.is_effect else -1, failure.at))
    if cause.kind == "input":
        return InputError(cause.message)
    return (RecoverableRankError if cause.recoverable else RankError)(cause)
