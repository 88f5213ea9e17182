"""The watchdog of a rank that torchrun or a cluster has started.

It is the rank's own main thread, which never waits for anything else. So it can end whatever the rank's work, in
another thread, is stuck in, and say which ranks are to blame.
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

from torch.distributed import DistStoreError
from torch.distributed.distributed_c10d import Store

from flyte_ddp.launch.environment import Environment
from flyte_ddp.launch.failures import Failure, PreemptedError, from_exception, name_the_cause
from flyte_ddp.launch.grace import grace_seconds, seconds_of_ranks
from flyte_ddp.launch.hangs import ANSWER_SECONDS, KEEPS_STORE, Answer, report_hang
from flyte_ddp.launch.launch_compat import read_stack, standing
from flyte_ddp.launch.link import ALIVE_SECONDS, DirectLink
from flyte_ddp.launch.phases import Timeouts
from flyte_ddp.launch.process_group import meet

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
    """Run work(store) in a thread of its own and return its value.

    A thread that is stuck is left behind, and the process ends without waiting for it.

    Args:
        work: gets a store for the process group of all ranks.
        link: the rank's link.
        environment: this rank.
        timeouts: how long a rank may be silent.
        stop_signals: ask the rank to stop. Until all ranks have met they end the process, because Python would not
            handle them.

    Raises:
        RankError: this rank has lost another one; or any rank has been silent for too long, with the ranks that the
            others wait for. It may be the recoverable kind.
        PreemptedError: this rank was asked to stop. Before the first step it is raised at once, else when the grace
            ends, which grace.py explains.
        Exception: whatever work raises.
    """
    grace = grace_seconds()
    store = meet(environment, timeouts)
    value = futures.Future[Value]()
    for number in stop_signals:
        if number == signal.SIGINT or signal.getsignal(number) != signal.SIG_IGN:  # as nohup has it for SIGHUP
            signal.signal(number, link.on_signal)

    def run() -> None:
        try:
            value.set_result(work(store))
        except BaseException as error:
            # Loader workers end with the frames that hold them. The error, which the future keeps alive, would not let
            # go of those, and multiprocessing would wait at the end of the process for workers that wait for that end.
            traceback.clear_frames(error.__traceback__)
            value.set_exception(error)

    thread = threading.Thread(target=copy_context().run, args=(run,), name="rank", daemon=True)

    def answer() -> Answer:
        return Answer(*standing(environment.local_rank), read_stack(thread.ident), link.phase)

    roll_call = RollCall(store.clone(), environment, timeouts, answer)
    thread.start()
    try:
        _wait(value, link, roll_call, timeouts, grace)
        # The thread still frees what the work held, and needs the interpreter for that
        thread.join(GRACE_SECONDS)
        return value.result()
    except Exception as error:
        failure = from_exception(error, environment.rank, environment.host)
        if failure.kind != "peer":
            raise
        roll_call.ask("loss")
        futures.wait([roll_call.found], GRACE_SECONDS)
        outcome = roll_call.result()
        lost = replace(failure, message=failure.message + (outcome.silent and f"; {outcome.silent}"))
        raise name_the_cause([outcome.failure if outcome.reason == "hang" else lost]) from error
    finally:
        roll_call.close()


def _wait(
    value: "futures.Future[Value]", link: DirectLink, roll_call: "RollCall", timeouts: Timeouts, grace: float
) -> None:
    """Return when the value is there. Raises RankError if a rank hangs, and PreemptedError when the grace has ended."""
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
            stop_at = min(stop_at, now + (seconds_of_ranks(grace) if link.saved.has_started else 0.0))
        if now >= stop_at:
            _leave_behind()
            raise PreemptedError(link.saved.end_of_grace(grace, link.phase, silent_seconds))
        patience = timeouts.seconds(link.phase)
        is_over = silent_seconds > patience + 2 * ANSWER_SECONDS
        if silent_seconds > patience:
            roll_call.ask("hang")
        if is_over or (roll_call.found.done() and roll_call.result().reason == "hang"):
            _leave_behind()
            raise name_the_cause([roll_call.result().failure])


def _leave_behind() -> None:
    """Keep the thread that still works from blocking the end of the interpreter."""
    atexit.register(os._exit, 1)


@dataclass(frozen=True)
class Found:
    """The finding of a roll call.

    Attributes:
        reason: "hang", or "loss" (of a rank, noticed by another one).
        failure: how to report a hang.
        silent: the ranks that do not answer, as the end of a message.
    """

    reason: str
    failure: Failure
    silent: str


class RollCall:
    """A thread that asks all ranks through their store where they are.

    The store never answers if its keeper stands still.

    A rank looks once a second whether another one has asked. The first rank that asks reads all answers and tells the
    others. So no rank's effort grows with the number of ranks, except that one's, and once.
    """

    def __init__(self, store: Store, environment: Environment, timeouts: Timeouts, answer: Callable[[], Answer]):
        self.found: futures.Future[Found] = futures.Future()
        self._store: Any = store
        self._timeouts = timeouts
        self._answer = answer
        self._rank = environment.rank
        self._size = environment.world.size
        self._host = environment.host
        self._keeper = UNKNOWN  # the host of the first rank, which keeps the store
        self._reason = ""
        self._woken = threading.Event()
        self._closed = False
        self._thread = threading.Thread(target=self._run, name="roll call", daemon=True)
        self._thread.start()

    def ask(self, reason: str) -> None:
        self._reason = self._reason or reason
        self._woken.set()

    def close(self) -> None:
        self._closed = True
        self._woken.set()
        self._thread.join(ALIVE_SECONDS)

    def result(self) -> Found:
        """Return what the ranks have found.

        Until then, and if the store does not answer, say that the store's keeper is silent.
        """
        if self.found.done():
            return self.found.result()
        answers = {0: Answer(stack=KEEPS_STORE)}
        hosts = {0: self._keeper}
        return self._found(self._reason, answers | {self._rank: self._answer()}, hosts | {self._rank: self._host})

    def _run(self) -> None:
        with suppress(RuntimeError):  # torch raises it if the store is gone, or a key is not there in time
            self._store.set(f"host {self._rank}", self._host)
            self._keeper = self._store.get("host 0").decode()
            while not self._woken.wait(ALIVE_SECONDS) and not self._store.check(["asked"]):
                pass
            if not self._closed:
                self.found.set_result(self._call())

    def _call(self) -> Found:
        own = f"{self._reason} {self._rank}"
        first = self._store.compare_set("asked", "", own).decode()
        answer = json.dumps([self._rank, self._host, asdict(self._answer())])
        self._store.append("answers", f"{answer}\n")
        if first == own:
            time.sleep(ANSWER_SECONDS)
        else:
            with suppress(DistStoreError):  # the rank that should tell the others may be lost, too
                self._store.wait(["found"], timedelta(seconds=GRACE_SECONDS))
        if not self._store.check(["found"]):
            # Several ranks may do this at once; the first one's finding counts
            self._store.compare_set("found", "", json.dumps(asdict(self._gather(first.split()[0]))))
        fields = json.loads(self._store.get("found"))
        return Found(**{**fields, "failure": Failure(**fields["failure"])})

    def _gather(self, reason: str) -> Found:
        answers, hosts = dict.fromkeys(range(self._size), Answer()), dict.fromkeys(range(self._size), UNKNOWN)
        for rank, host, answer in map(json.loads, self._store.get("answers").decode().splitlines()):
            answers[rank] = Answer(**answer)
            hosts[rank] = host
        for rank in answers:
            if hosts[rank] == UNKNOWN and self._store.check([f"host {rank}"]):
                hosts[rank] = self._store.get(f"host {rank}").decode()
        return self._found(reason, answers, hosts)

    def _found(self, reason: str, answers: dict[int, Answer], hosts: dict[int, str]) -> Found:
        silent = [f"rank {rank} on {hosts[rank]}" for rank in sorted(answers) if answers[rank].reached < 0]
        do_not = "does not answer" if len(silent) == 1 else "do not answer"
        return Found(
            reason, report_hang(answers, hosts, self._timeouts), f"{', '.join(silent)} {do_not}" if silent else ""
        )
