"""The watchdog of a rank that torchrun or a cluster has started. hangs.py says why our launcher has another one.

The watchdog is the rank's main thread. It waits for nothing else, so it can end the process, and say which ranks are to
blame, whatever the rank's work in another thread is stuck in.
"""

import atexit
import json
import math
import os
import signal
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from concurrent import futures
from contextlib import suppress
from contextvars import copy_context
from dataclasses import asdict, dataclass, replace
from datetime import timedelta
from typing import Any, TypeVar

from torch.distributed import DistError, DistStoreError
from torch.distributed.distributed_c10d import Store

from flyte_ddp.launch.environment import Environment
from flyte_ddp.launch.failures import Failure, PreemptedError, from_exception, name_the_cause
from flyte_ddp.launch.hangs import ANSWER_SECONDS, KEEPS_STORE, Answer, report_hang
from flyte_ddp.launch.launch_compat import locate_rank, read_stack
from flyte_ddp.launch.link import ALIVE_SECONDS, DirectLink
from flyte_ddp.launch.phases import Timeouts
from flyte_ddp.launch.process_group import meet
from flyte_ddp.launch.signals import on_signals

# The rank that caused a failure reports it first, and the others say meanwhile that they are still there
GRACE_SECONDS = ANSWER_SECONDS + 2 * ALIVE_SECONDS
UNKNOWN = "unknown host"
Value = TypeVar("Value")


def under_watchdog(
    work: Callable[[Store], Value],
    link: DirectLink,
    environment: Environment,
    timeouts: Timeouts,
    stop_signals: Sequence[signal.Signals] = (),
) -> Value:
    """Wait for all ranks, run work(store) in a thread of its own, and return its value, unless a rank hangs.

    Every rank that torchrun or a cluster has started calls this function, in its main thread. After a hang, or a
    PreemptedError, work's thread is left behind: the process later ends with status 1, without waiting for the thread.

    Args:
        work: gets a store for the process group of all ranks.
        link: the rank's link. work must call its heartbeat() or emit() often enough.
        environment: this rank.
        timeouts: how long a rank may go without a sign of life, by phase.
        stop_signals: signals that ask the rank to stop, once all ranks have met. Until then such a signal ends the
            process. The handlers stay after the call.

    Raises:
        RankError: this rank has lost another one, or a rank has been silent for too long. The message names the ranks
            that do not answer, or for which the others wait. The error is a RecoverableRankError if another attempt may
            succeed. A RankError also replaces what work raises if that is no Exception, such as SystemExit.
        PreemptedError: this rank was asked to stop, but work goes on. The error comes at once before the first step,
            else when the grace ends: the time that the platform gives after a SIGTERM.
        Exception: whatever else work raises, such as StopRequested, or what torch raises if a rank does not come in
            time.
    """
    # The caller may have handlers that do nothing, and Python could not call a handler while meet() waits
    with on_signals(stop_signals, signal.SIG_DFL):
        store = meet(environment, timeouts)
    value = futures.Future[Value]()
    for number in stop_signals:
        if number == signal.SIGINT or signal.getsignal(number) != signal.SIG_IGN:  # as nohup has it for SIGHUP
            signal.signal(number, link.on_signal)

    def run() -> None:
        try:
            value.set_result(work(store))
        except BaseException as error:
            told = error
            if not isinstance(error, Exception):  # such as SystemExit, by which this process would end without a word
                told = name_the_cause([from_exception(error, environment.rank, environment.host)])
            # Loader workers end with the frames that hold them. The error, which the future keeps alive, would not let
            # go of those, and multiprocessing would wait at the end of the process for workers that wait for that end.
            traceback.clear_frames(error.__traceback__)
            value.set_exception(told)

    thread = threading.Thread(target=copy_context().run, args=(run,), name="rank", daemon=True)

    def answer() -> Answer:
        return replace(locate_rank(environment.local_rank), stack=read_stack(thread.ident), phase=link.phase)

    roll_call = RollCall(store.clone(), environment, timeouts, answer)
    thread.start()
    try:
        _wait(value, link, roll_call, timeouts)
        # The thread still frees what the work held, and needs the interpreter for that
        thread.join(GRACE_SECONDS)
        return value.result()
    except Exception as error:
        failure = from_exception(error, environment.rank, environment.host)
        if failure.kind != "peer":
            raise
        roll_call.ask("loss")
        futures.wait([roll_call.finding], GRACE_SECONDS)
        finding = roll_call.result()
        lost = replace(failure, message=failure.message + (finding.silent and f"; {finding.silent}"))
        raise name_the_cause([finding.failure if finding.reason == "hang" else lost]) from error
    finally:
        roll_call.close(has_succeeded=value.done() and not value.exception())


def _wait(value: "futures.Future[Value]", link: DirectLink, roll_call: "RollCall", timeouts: Timeouts) -> None:
    """Wait until the work has ended, and return; raise an error if a rank hangs, or if the grace of a stop is over.

    The work's own value or error stays in `value`: this function does not raise it. After an error here, the
    interpreter will end with status 1, without waiting for the work's thread.

    Args:
        value: the future of the work.
        link: this rank's link, which counts the work's signs of life and gets requests to stop.
        roll_call: asks all ranks where they are, once this rank is silent for too long.
        timeouts: how long this rank may be silent, by phase.

    Raises:
        RankError: This rank or another one hangs.
        PreemptedError: This rank was asked to stop, and the grace has ended.
    """
    silent_seconds = 0.0
    steps = link.steps
    now = time.monotonic()
    stop_at = math.inf
    while not futures.wait([value], ALIVE_SECONDS).done:
        # A rank was not silent while this very process was suspended
        turn = min(time.monotonic() - now, 2 * ALIVE_SECONDS)
        now = time.monotonic()
        silent_seconds = silent_seconds + turn if steps == link.steps else 0.0
        steps = link.steps
        if link.stop_requested:
            stop_at = min(stop_at, now + link.grace.seconds_of_ranks())
        patience = timeouts.seconds(link.phase)
        if silent_seconds > patience:
            roll_call.ask("hang")
        has_found_hang = roll_call.finding.done() and roll_call.result().reason == "hang"
        if now >= stop_at:
            error: Exception = PreemptedError(link.grace.describe_end(link.phase, silent_seconds))
        elif has_found_hang or silent_seconds > patience + 2 * ANSWER_SECONDS:
            error = name_the_cause([roll_call.result().failure])
        else:
            continue
        atexit.register(os._exit, 1)  # the thread, which still works, might block the end of the interpreter
        raise error


@dataclass(frozen=True)
class Finding:
    """The finding of a roll call, the same on all ranks.

    Attributes:
        reason: why a rank has asked: "hang", or "loss" (it has lost another rank).
        failure: the report of a hang; of no meaning after a loss.
        silent: the ranks that do not answer, such as "rank 2 on node-b does not answer"; empty if all do.
    """

    reason: str
    failure: Failure
    silent: str


class RollCall:
    """A thread of each rank through which all ranks ask one another, over their store, where they are.

    A rank looks once a second whether another one has asked. The first rank that asks reads all answers and tells the
    others. So no rank's effort grows with the number of ranks, except that one's, and once. Keys of the store: "host
    RANK", "asked" (reason and rank of the first that asks), "answers" (a line of JSON from each rank; that of a rank
    whose work has succeeded says so), "found".

    Attributes:
        finding: is set once, when a rank has asked. It never comes if the process that keeps the store, which is rank
            0's or its agent, stands still.
    """

    def __init__(self, store: Store, environment: Environment, timeouts: Timeouts, answer: Callable[[], Answer]):
        """Start the thread.

        Args:
            store: a client of the ranks' store that nothing else uses, because a question may block it.
            environment: this rank.
            timeouts: the limits, for the report.
            answer: returns where this rank is; any thread may call it.
        """
        self.finding: futures.Future[Finding] = futures.Future()
        self._store: Any = store
        self._timeouts = timeouts
        self._answer = answer
        self._rank = environment.rank
        self._size = environment.world.size
        self._host = environment.host
        self._keeper = UNKNOWN  # the host of rank 0, which keeps the store
        self._reason = ""
        self._woken = threading.Event()
        self._closed = False
        self._has_succeeded = False
        self._thread = threading.Thread(target=self._run, name="roll call", daemon=True)
        self._thread.start()

    def ask(self, reason: str) -> None:
        """Have the thread ask all ranks, because of a "hang" or a "loss". Only the first call counts."""
        self._reason = self._reason or reason
        self._woken.set()

    def close(self, has_succeeded: bool = False) -> None:
        """Tell the thread to end, and wait for it for at most ALIVE_SECONDS, since the store may block it.

        Args:
            has_succeeded: whether this rank's work has succeeded. If so, the other ranks do not take this rank for a
                silent one.
        """
        self._has_succeeded = has_succeeded
        self._closed = True
        self._woken.set()
        self._thread.join(ALIVE_SECONDS)

    def result(self) -> Finding:
        """Return the finding or, if there is none yet, one by which rank 0, which keeps the store, does not answer."""
        if self.finding.done():
            return self.finding.result()
        answers = {0: Answer(stack=KEEPS_STORE), self._rank: self._answer()}
        hosts = {0: self._keeper, self._rank: self._host}
        return self._conclude(self._reason, answers, hosts)

    def _run(self) -> None:
        """Wait until any rank asks where the ranks are, then answer, and set `finding` to what all ranks agree on.

        A thread of each rank runs this method. The thread ends without a finding if close() comes first, or if the
        store is gone. If close() says that this rank has succeeded, the thread notes so in the store, for ranks that
        ask later.
        """
        with suppress(DistError):  # torch raises it if the store is gone, or a key is not there in time
            self._store.set(f"host {self._rank}", self._host)
            self._keeper = self._store.get("host 0").decode()
            while not self._woken.wait(ALIVE_SECONDS) and not self._store.check(["asked"]):
                pass
            if not self._closed:
                self.finding.set_result(self._exchange_answers())
            elif self._has_succeeded:
                self._leave(None)

    def _exchange_answers(self) -> Finding:
        """Write where this rank is to the store, and return the finding, which says which ranks are to blame.

        The finding is the same on all ranks. The first rank that asked waits ANSWER_SECONDS for the answers, and then
        writes the finding to the store. The other ranks wait for the finding for at most GRACE_SECONDS, and then write
        it themselves. If several ranks write, the first finding counts.
        """
        own = f"{self._reason} {self._rank}"
        first = self._store.compare_set("asked", "", own).decode()
        self._leave(asdict(self._answer()))
        if first == own:
            time.sleep(ANSWER_SECONDS)
        else:
            with suppress(DistStoreError):  # the rank that should tell the others may be lost, too
                self._store.wait(["found"], timedelta(seconds=GRACE_SECONDS))
        if not self._store.check(["found"]):
            # Several ranks may do this at once; the first one's finding counts
            self._store.compare_set("found", "", json.dumps(asdict(self._gather(first.split()[0]))))
        fields = json.loads(self._store.get("found"))
        return Finding(fields["reason"], Failure(**fields["failure"]), fields["silent"])

    def _leave(self, answer: dict[str, Any] | None) -> None:
        """Add this rank's answer to those in the store; None says that its work has succeeded."""
        self._store.append("answers", f"{json.dumps([self._rank, self._host, answer])}\n")

    def _gather(self, reason: str) -> Finding:
        """Return the finding, which says which ranks are to blame, from the answers that are in the store now.

        Ranks without an answer count as silent. Ranks whose work has succeeded are left out.

        Args:
            reason: why a rank has asked: "hang", or "loss" if it has lost another rank.
        """
        answers = dict.fromkeys(range(self._size), Answer())
        hosts = dict.fromkeys(range(self._size), UNKNOWN)
        for rank, host, answer in map(json.loads, self._store.get("answers").decode().splitlines()):
            hosts[rank] = host
            if answer:
                answers[rank] = Answer(**answer)
            else:
                del answers[rank]
        for rank in answers:
            if hosts[rank] == UNKNOWN and self._store.check([f"host {rank}"]):
                hosts[rank] = self._store.get(f"host {rank}").decode()
        return self._conclude(reason, answers, hosts)

    def _conclude(self, reason: str, answers: dict[int, Answer], hosts: dict[int, str]) -> Finding:
        """Return the finding from answers and hosts by rank."""
        silent = [f"rank {rank} on {hosts[rank]}" for rank in sorted(answers) if answers[rank].reached < 0]
        do_not = "does not answer" if len(silent) == 1 else "do not answer"
        named = f"{', '.join(silent)} {do_not}" if silent else ""
        return Finding(reason, report_hang(answers, hosts, self._timeouts), named)
