"""The launcher: it starts one process per rank on this host, listens to them, and ends them all, whatever happens.

Standard library only: the parent of a training run never imports torch, which takes longer than starting Python.
"""

import math
import multiprocessing
import os
import pickle
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from multiprocessing import connection, forkserver, resource_tracker
from pathlib import Path
from typing import Any

import flyte_ddp
from flyte_ddp.events import Event, StartUp
from flyte_ddp.launch.environment import Environment, World, available_cores, default_variable, threads_per_rank
from flyte_ddp.launch.failures import LOSSES, Failure, PreemptedError, RankError, from_exit_code, name_the_cause
from flyte_ddp.launch.grace import Grace
from flyte_ddp.launch.hangs import ANSWER_SECONDS, Answer, report_hang
from flyte_ddp.launch.launch_compat import leave_behind
from flyte_ddp.launch.phases import STARTING, WRITING, Timeouts
from flyte_ddp.launch.rank import serve
from flyte_ddp.launch.signals import STOP_SIGNALS, on_signals, stop_requests
from flyte_ddp.settings import RunOptions
from flyte_ddp.text import listed

# forkserver: one process imports torch; every rank is forked from it in a few milliseconds and shares its memory.
# macOS's own libraries don't survive a fork, so there each rank starts from scratch.
START_METHOD = "forkserver" if sys.platform == "linux" else "spawn"
FORK_SERVER = "flyte_ddp.launch.fork_server"  # where it is not found, a launch takes a little longer
# What the ranks import from outside this package; the flop counter imports triton
PRELOAD = ["torch", "torch.utils.flop_counter", "numpy", "dataclasses_json", "click"]

# OpenMP's threads wait for one another by turning in a loop, GNU's for 300,000 turns. Beside other programs these take
# cores from the thread that is waited for. On two cores with two such programs, an epoch of the digits took 4.5 s with
# these turns and 8.6 s with GNU's; alone it took 1.5 s with either.
SPIN_COUNT = "10000"

MOST_PER_CORE = 8  # ranks that compute on a CPU without a word about their number
GRACE_SECONDS = 3.0  # for the other ranks' reports once one has failed: the first to arrive may not be the cause
MOST_INTERRUPTS = 3  # the third Ctrl-C ends even ranks that write a checkpoint, once the grace is over
POLL_SECONDS = 0.2
SETTLE_SECONDS = 0.5  # their stacks, which they write piece by piece, are whole when they have not grown for so long
MOST_BYTES = 60  # of a folder's path in which multiprocessing makes another one, for sockets
ALONE = World(size=1, local_size=1, backend="gloo", device="cpu")
END_SECONDS = 10.0  # after SIGKILL, until a rank is abandoned: stuck in a driver, it may never end


def warm_up(preload: Sequence[str] = PRELOAD) -> None:
    """Start the process that ranks are forked from, and return at once.

    A second call does nothing, even with other modules. Outside Linux, where ranks are not forked, no call does
    anything.

    Args:
        preload: names of modules that this process imports once for all ranks.
    """
    if START_METHOD == "forkserver":
        # The forkserver must live as long as the ranks, which unblock these signals. They may be sent to the whole
        # process group, as by Ctrl-C.
        resource_tracker.ensure_running()  # else forkserver would start it, which unblocks the signal
        mask = signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)
        try:
            with _importable(), default_variable("GOMP_SPINCOUNT", SPIN_COUNT, "OMP_WAIT_POLICY"), _room_for_sockets():
                forkserver.set_forkserver_preload([FORK_SERVER, *preload])
                forkserver.ensure_running()
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)


def launch(
    target: str,
    world: World,
    argument: Any,
    timeouts: Timeouts | RunOptions | float,
    on_event: Callable[[Event], None],
    preload: Sequence[str] = PRELOAD,
    root: str = "",
    first: int = 0,
) -> list[Any]:
    """Run target(environment, link, argument) in a process for each rank on this host, and wait for the ranks.

    When the call returns or raises, the ranks have ended, and so have all processes that they started, except those in
    a session of their own. The call handles the signals that ask to stop, if its thread is the main one.

    Args:
        target: the function's name, "module:function". The ranks import the module; the parent doesn't, because that
            would import torch.
        world: the number of ranks and their devices.
        argument: the object that each rank gets; it is pickled.
        timeouts: limits after which a silent rank counts as hung. A number of seconds is the limit for all phases.
        on_event: called in this thread for each event of rank 0, and for each line that any rank prints (Printed). On a
            CPU with far more ranks than cores, a StartUp that says so comes first. What on_event raises ends the ranks,
            and is raised here.
        preload: modules that are imported once for all ranks, if this is the first launch.
        root: a folder that comes first on the ranks' sys.path, such as UserCode.root.
        first: the number of the first rank on this host. Ranks first to first + world.local_size - 1 are started here.

    Returns:
        The value that each rank of this host returned, by rank; also after a signal, if all ranks still returned.

    Raises:
        RankError: A rank has failed or hangs. The error names the first rank that failed, or else the hung ranks that
            the others wait for. It is a RecoverableRankError if another attempt may succeed.
        InputError: A rank raised an InputError; or an environment variable that sets the grace is wrong.
        PreemptedError: This process got a SIGTERM or SIGHUP, or a rank got a SIGTERM. The ranks are asked to stop.
            Before the first step they are killed at once, and afterwards when the grace is over (see grace.py). If
            rank 0 is on another host, the ranks always have the grace.
        KeyboardInterrupt: The user pressed Ctrl-C. The ranks end as after a SIGTERM, but a checkpoint that a rank
            writes as the grace ends is still finished. A second Ctrl-C ends the ranks at once, unless one of them
            writes a checkpoint. A third Ctrl-C ends the ranks even then, once the grace is over.
    """
    grace = Grace(is_told=first == 0)
    grace.has_started = first > 0  # rank 0 alone tells of the first step
    warm_up(preload)
    threads = threads_per_rank(world.local_size)
    cores = available_cores()
    if world.device == "cpu" and world.local_size > MOST_PER_CORE * cores:
        these = f"{cores} core{'s' * (cores > 1)}"
        on_event(StartUp(f"{world.local_size} ranks, which take turns on {these}: a lower nproc may be faster"))
    ranks: list[_Rank] = []
    with on_signals(STOP_SIGNALS, lambda *_: None):  # nothing interrupts the clean-up
        private = tempfile.mkdtemp(prefix="ddp-")
        try:
            suspending = on_signals([signal.SIGTSTP], lambda *_: _suspend(ranks))
            with stop_requests(lambda: any(rank.is_writing for rank in ranks)) as signals, suspending:
                for local_rank in range(world.local_size):
                    rank = first + local_rank
                    environment = Environment(world, rank, local_rank, f"file://{private}/rendezvous", threads)
                    ranks.append(_Rank(environment, target, argument, private, root))
                return _supervise(ranks, Timeouts.of(timeouts), on_event, signals, grace)
        finally:
            for started in ranks:
                started.send_signal(signal.SIGKILL)
            for started in ranks:
                started.end()
            shutil.rmtree(private, ignore_errors=True)


def run_alone(
    target: str,
    argument: Any,
    timeouts: RunOptions | float,
    on_event: Callable[[Event], None],
    world: World = ALONE,
    root: str = "",
) -> Any:
    """Run target(environment, link, argument) in a single process of its own, and return its value.

    The other arguments, and the errors, are those of launch(). The world has one rank, by default on the CPU.
    """
    return launch(target, world, argument, timeouts, on_event, root=root)[0]


class _Rank:
    """The parent's side of one rank: its process, the pipe to it, and what it has sent so far.

    Attributes:
        outcome: how the rank ended: "done", "stopped" or "failed"; empty while it runs.
        value: its return value; why it stopped; or its Failure.
        answer: its answer to request("locate"), without stack and phase.
        phase: the phase of its last heartbeat.
        silent_seconds: the time since its last message, during which the parent has listened.
        stacks: the file to which it writes its stacks on SIGUSR1.
    """

    def __init__(self, environment: Environment, target: str, argument: Any, private: str, root: str):
        """Start the process; see launch and serve for the parameters."""
        context: Any = multiprocessing.get_context(START_METHOD)
        self.rank, self.host = environment.rank, environment.host
        self.line, child_line = context.Pipe()
        self._pieces: list[bytes] = []  # of a message whose end has not come
        self.process = context.Process(
            target=serve, args=(child_line, environment, target, argument, private, dict(os.environ)), daemon=True
        )
        self.stacks = Path(private, f"stack-{self.rank}")
        self.stacks.touch()  # a rank that hangs while starting has not created it
        self.outcome = ""
        self.value: Any = None
        self.peak_bytes = 0
        self.answer = Answer()
        self.phase = STARTING
        self.silent_seconds = 0.0
        with _importable(root):
            self.process.start()
        child_line.close()

    @property
    def is_writing(self) -> bool:
        """Whether the rank writes a checkpoint or results."""
        return self.phase == WRITING and not self.outcome

    def receive(self, on_event: Callable[[Event], None]) -> None:
        """Read the rank's waiting messages: pass events to on_event, and store the others in this object's attributes.

        Each message sets silent_seconds to 0. Reading stops after POLL_SECONDS while the process lives, because the
        rank may send without end. If the process has ended without an outcome, the outcome becomes "failed", and value
        a Failure from its exit code.

        Args:
            on_event: called for each event. Its errors are raised here.
        """
        ended = not self.process.is_alive()  # asked first: whatever it sent before it ended can now be read
        until = time.monotonic() + POLL_SECONDS  # it may send faster than observers handle it, without end
        while not self.outcome and self.line.poll() and (ended or time.monotonic() < until):
            try:
                piece = self.line.recv_bytes()
            except (EOFError, OSError):
                self.process.join(END_SECONDS)
                ended = True
                break
            self.silent_seconds = 0.0
            self._pieces.append(piece[1:])
            if not piece[0]:  # it is not the last one
                continue
            kind, content = pickle.loads(b"".join(self._pieces))
            self._pieces.clear()
            if kind == "event":
                on_event(content)
            elif kind == "heartbeat":
                self.phase, self.peak_bytes = content
            elif kind == "answer":
                self.answer = content
            else:
                self.outcome, self.value = kind, content
        if ended and not self.outcome:
            self.outcome = "failed"
            self.value = from_exit_code(self.process.exitcode or 0, self.rank, self.host, self.peak_bytes)

    def request(self, what: str) -> None:
        """Ask the rank to stop ("stop"), or to send an answer that says where it is ("locate")."""
        with suppress(OSError):  # it may have ended in the meantime
            self.line.send(what)

    def send_signal(self, number: signal.Signals) -> None:
        """Send a signal to the rank and to all processes that it has started, unless they have ended."""
        pid = self.process.pid or 0
        try:
            os.killpg(pid, number)
        except ProcessLookupError:
            if self.process.is_alive():  # but has not got so far as to have a process group
                with suppress(ProcessLookupError):  # or ends just now
                    os.kill(pid, number)

    def end(self) -> None:
        """Kill the process, wait for its end, at most END_SECONDS, and close the pipe."""
        self.process.kill()
        self.process.join(END_SECONDS)
        if self.process.exitcode is None:
            leave_behind(self.process)
        self.line.close()


def _supervise(
    ranks: list[_Rank], timeouts: Timeouts, on_event: Callable[[Event], None], signals: list[int], grace: Grace
) -> list[Any]:
    """Listen to the ranks until all have ended, and return their values by rank.

    After an error, ranks may still run: the caller kills them.

    Args:
        ranks: the ranks of this host.
        timeouts: limits after which a silent rank counts as hung.
        on_event: called for each event of rank 0 and each printed line.
        signals: the stop signals so far. Signal handlers append to this list while the function runs.
        grace: is told where the checkpoints are, and says how long ranks may go on after the first signal.

    Returns:
        The value of each rank.

    Raises:
        RankError: A rank has failed or hangs.
        InputError: A rank raised an InputError.
        PreemptedError: This process got a SIGTERM or SIGHUP, or a rank got a SIGTERM.
        KeyboardInterrupt: The user pressed Ctrl-C.
    """
    noticed = math.inf
    give_up_at = 0.0
    now = time.monotonic()

    def note(event: Event) -> None:
        grace.note(event)
        on_event(event)

    while True:
        running = [rank for rank in ranks if not rank.outcome]
        connection.wait([rank.line for rank in running] + [r.process.sentinel for r in running], POLL_SECONDS)
        # A rank is not silent while nobody listens: this process was suspended, or an observer kept it busy
        turn = min(time.monotonic() - now, 2 * POLL_SECONDS)
        now = time.monotonic()
        for rank in running:
            rank.silent_seconds += turn
            rank.receive(note)
        failures = [rank.value for rank in ranks if rank.outcome == "failed"]
        if failures:
            give_up_at = give_up_at or now + GRACE_SECONDS
            has_ended = all(rank.outcome in ("done", "failed") for rank in ranks)
            if now >= give_up_at or has_ended or not all(failure.is_effect for failure in failures):
                error = name_the_cause(_with_ended(failures, ranks))
                is_loss = isinstance(error, RankError) and error.failure.kind in LOSSES
                if is_loss and signals and signal.SIGINT not in signals:  # the node goes down
                    until = min(noticed, now) + grace.seconds_of_upload()
                    raise PreemptedError(f"{signal.Signals(signals[0]).name}: {error}", until)
                raise error
        if signals and noticed == math.inf:
            noticed = now
            for rank in ranks:
                rank.request("stop")
        if all(rank.outcome == "done" for rank in ranks):
            return [rank.value for rank in ranks]
        is_over = now >= noticed + grace.seconds_of_ranks()
        if all(rank.outcome for rank in ranks) or (is_over and not _may_write_on(ranks, signals)):
            raise _error_of_stop(ranks, signals, grace, noticed + grace.seconds_of_upload())
        exceeded = [rank.silent_seconds > timeouts.seconds(rank.phase) for rank in ranks if not rank.outcome]
        if timeouts.are_hung(exceeded):
            raise _error_of_hang(ranks, timeouts, note)


def _may_write_on(ranks: list[_Rank], signals: list[int]) -> bool:
    """Return whether a rank is writing a checkpoint that it may finish, though the grace is over.

    It may after Ctrl-C, pressed fewer than MOST_INTERRUPTS times, without another signal: no platform then ends this
    host.
    """
    is_user = {*signals} == {signal.SIGINT} and len(signals) < MOST_INTERRUPTS
    return is_user and any(rank.is_writing for rank in ranks)


def _with_ended(failures: Sequence[Failure], ranks: Sequence[_Rank]) -> list[Failure]:
    """Return the failures. The message of a hang or a lost peer also names the ranks that had ended by then, if any."""
    ended = [str(rank.rank) for rank in ranks if rank.outcome == "done"]
    said = f"rank{'s' * (len(ended) > 1)} {listed(ended)} had ended before: " if ended else ""
    return [replace(one, message=said + one.message) if one.kind in ("hang", "peer") else one for one in failures]


def _error_of_stop(ranks: list[_Rank], signals: list[int], grace: Grace, until: float) -> BaseException:
    """Return, without raising it, the error of a run that was asked to stop.

    Call this when all ranks of this host have ended, at least one of them as "stopped", or when the grace is over. The
    grace is the time from the request to stop until the ranks are killed.

    Args:
        ranks: the ranks of this host.
        signals: the signals that this process got, in their order. They are empty if only a rank got a SIGTERM.
        grace: the grace, which also knows the position of the newest checkpoint, for the message.
        until: the `until` of a PreemptedError: the time of time.monotonic() up to which a checkpoint may be uploaded.

    Returns:
        A KeyboardInterrupt if the first signal was Ctrl-C. Otherwise a PreemptedError. If all ranks have ended, its
        message says why one of them stopped. If not, it says what a rank was still doing when the grace was over.
    """
    number = signals[0] if signals else signal.SIGTERM  # sent to a rank alone, as by a guard of the host's memory
    if number == signal.SIGINT:
        return KeyboardInterrupt()
    slow = [rank for rank in ranks if not rank.outcome]
    if slow:
        slowest = next((rank for rank in slow if rank.is_writing), slow[0])
        last = grace.describe_end(slowest.phase, slowest.silent_seconds)
    else:
        last = next(rank.value for rank in ranks if rank.outcome == "stopped")
    return PreemptedError(f"all ranks on {ranks[0].host}: {signal.Signals(number).name}: {last}", until)


def _error_of_hang(ranks: list[_Rank], timeouts: Timeouts, on_event: Callable[[Event], None]) -> Exception:
    """Ask the running ranks where they are, and return the error of a hang.

    The error, a RecoverableRankError, is not raised here. It names the ranks for which the others wait, and has the
    Python stacks of every running rank. The call waits for answers, for about ANSWER_SECONDS at most, as stopped ranks
    never answer.

    Args:
        ranks: the ranks of this host.
        timeouts: the timeouts by phase, for the message.
        on_event: called for each event that arrives in the meantime.
    """
    running = [rank for rank in ranks if not rank.outcome]
    for rank in running:
        with suppress(ProcessLookupError):  # it may have ended in the meantime
            os.kill(rank.process.pid or 0, signal.SIGUSR1)
        rank.request("locate")
    deadline = time.monotonic() + ANSWER_SECONDS
    sizes: list[int] = []
    while time.monotonic() < deadline:
        time.sleep(SETTLE_SECONDS)
        for rank in running:
            rank.receive(on_event)
        before, sizes = sizes, [rank.stacks.stat().st_size for rank in running]
        if sizes == before and all(sizes) and all(rank.answer != Answer() for rank in running):
            break
    answers = {rank.rank: replace(rank.answer, phase=rank.phase, stack=rank.stacks.read_text()) for rank in running}
    hang = report_hang(answers, {rank.rank: rank.host for rank in running}, timeouts)
    return name_the_cause(_with_ended([hang], ranks))


def _suspend(ranks: list[_Rank]) -> None:
    """Suspend the ranks and then this process, after Ctrl-Z; once this process goes on, let the ranks go on.

    The terminal sends Ctrl-Z to this process alone, because ranks are in process groups of their own.
    """
    for rank in ranks:
        rank.send_signal(signal.SIGSTOP)
    os.kill(os.getpid(), signal.SIGSTOP)
    for rank in ranks:
        rank.send_signal(signal.SIGCONT)


@contextmanager
def _room_for_sockets() -> Iterator[None]:
    """Make /tmp the folder of Python's temporary files, if the usual path is too long for a socket; a context manager.

    The change holds while the block runs. Nothing changes if /tmp is not writable. TMPDIR itself stays as it is.
    multiprocessing keeps the folder that it chooses for its first socket, so this block must be the first to need one.
    """
    # The system allows about a hundred bytes, and a cluster's queue may set a long TMPDIR. Python 3.14 does the same.
    chosen = tempfile.tempdir
    if len(os.fsencode(tempfile.gettempdir())) > MOST_BYTES and os.access("/tmp", os.W_OK | os.X_OK):
        tempfile.tempdir = "/tmp"
    try:
        yield
    finally:
        tempfile.tempdir = chosen


@contextmanager
def _importable(root: str = "") -> Iterator[None]:
    """Put `root` and this package's parent folder first on sys.path while the block runs; a context manager.

    An empty `root` is left out. Ranks that the block starts inherit this sys.path, even if they are forked from another
    process. Processes that the block starts do not import this process's main module, as multiprocessing would have
    them do.
    """
    # The main module may import flytekit, which takes 2 s. `pyflyte run` has the project root on sys.path only while it
    # loads the workflow.
    main = sys.modules["__main__"]
    library = str(Path(flyte_ddp.__path__[0]).parent)
    folders = [root, library] if root else [library]
    names = [name for name in ("__file__", "__spec__") if name in main.__dict__]
    hidden: dict[str, Any] = {name: main.__dict__.pop(name) for name in names}
    main.__spec__ = None
    sys.path[:0] = folders
    try:
        yield
    finally:
        for folder in folders:
            sys.path.remove(folder)
        main.__dict__.update(hidden)
