"""Which rank failed, of what, and whether trying again can help. Imports no torch."""

import re
import signal
import time
import traceback
from dataclasses import dataclass, field
from typing import Sequence

from flyte_ddp.errors import RecoverableError, ReportedError

# What a rank says when another one has gone or does not answer: an effect, never the cause
PEER_ERRORS = {"DistBackendError", "DistNetworkError", "DistStoreError", "DistError", "DistQueueEmptyError"}
PEER_MESSAGE = re.compile(
    r"gloo|NCCL|connection (closed|reset|refused)|broken pipe|timed out (after|waiting)|wait timeout", re.IGNORECASE
)


@dataclass(frozen=True)
class Failure:
    """One rank's end.

    Attributes:
        kind: error (an exception of its own), killed (by a signal), hang, or peer (it lost another rank).
        cause: the exception's type, or the signal's name.
        details: the traceback, or the stacks of a hang.
    """

    rank: int
    host: str
    kind: str
    cause: str
    message: str
    details: str = ""
    recoverable: bool = True
    at: float = field(default_factory=time.time)

    def __str__(self) -> str:
        headline = f"rank {self.rank} on {self.host}: {self.cause}: {self.message}"
        return f"{headline}\n\n{self.details}" if self.details else headline


class RankFailed(ReportedError):
    """Training ended because of the failure of one rank; trying again would end the same way."""

    def __init__(self, failure: Failure):
        super().__init__(str(failure))
        self.failure = failure


class RecoverableRankFailed(RankFailed, RecoverableError):
    """Training ended because of one rank, for a reason that may not come again."""


class Preempted(RecoverableError):
    """The process was asked to end (SIGTERM); where a checkpoint was possible, it has been written."""


def from_exception(error: BaseException, rank: int, host: str) -> Failure:
    """Sorts an exception that ended a rank."""
    cause, message = type(error).__name__, str(error)
    types = {base.__name__ for base in type(error).__mro__}
    is_peer = bool(types & PEER_ERRORS) or (type(error) is RuntimeError and bool(PEER_MESSAGE.search(message)))
    if "OutOfMemoryError" in types:
        message += " (lower batch_size, or train on more GPUs)"
    lost_worker = type(error) is RuntimeError and message.startswith("DataLoader worker")
    if lost_worker:
        message += " (out of memory, or of shared memory? lower loader_workers or batch_size)"
    return Failure(
        rank=rank,
        host=host,
        kind="peer" if is_peer else "error",
        cause=cause,
        message=message,
        details="".join(traceback.format_exception(type(error), error, error.__traceback__)),
        recoverable=is_peer or lost_worker or isinstance(error, RecoverableError),
    )


def from_exit_code(code: int, rank: int, host: str, peak_bytes: int = 0) -> Failure:
    """A rank that ended without a word: by a signal, or by somebody's os._exit."""
    memory = f"; peak memory {peak_bytes / 2**20:.0f} MiB" if peak_bytes else ""
    if code >= 0:
        return Failure(rank, host, "killed", f"exit status {code}", f"ended without a report{memory}")
    name = signal.Signals(-code).name
    hint = "probably out of memory" if name == "SIGKILL" else "killed from outside, or a crash in native code"
    return Failure(rank, host, "killed", name, f"{hint}{memory}")


def name_the_cause(failures: Sequence[Failure]) -> RankFailed:
    """The exception for a failed run: the first failure that is not just the loss of a peer."""
    cause = min(failures, key=lambda failure: (failure.kind == "peer", failure.at))
    return (RecoverableRankFailed if cause.recoverable else RankFailed)(cause)
