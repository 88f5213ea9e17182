"""A rank that runs a script in its own process as __main__, with what torchrun would have set."""

import json
import multiprocessing
import os
import re
import signal
import sys
import threading
from contextlib import suppress
from pathlib import Path
from types import ModuleType
from typing import Any, NoReturn

from flyte_ddp.attempt.pod import CHECKPOINT_VARIABLE, EVENTS_VARIABLE, SCRIPT_VARIABLES
from flyte_ddp.errors import StopRequested
from flyte_ddp.events import NotLearning, RunStarted, StepLogged
from flyte_ddp.launch.environment import Environment
from flyte_ddp.launch.failures import from_exception
from flyte_ddp.launch.launch_compat import count_collectives, run_exit_handlers
from flyte_ddp.launch.limits import peak_memory
from flyte_ddp.launch.link import ParentLink
from flyte_ddp.script.job import ScriptJob, ScriptResult

EXIT = os._exit  # run() replaces it while the script runs
FAREWELL_SECONDS = 60.0  # for threads and exit handlers after an error, until the parent is told and ends all ranks
LOOK_SECONDS = 0.5  # time between two looks at requests, events and collectives


class ScriptStopped(StopRequested):
    """The end of a script after a request to stop."""

    def __init__(self, how: str = "") -> None:
        Exception.__init__(self, f"the script was asked to stop, and has ended {how}".strip())


def run(environment: Environment, link: ParentLink, job: ScriptJob) -> ScriptResult:
    """Run the script as __main__ in this process, as one rank, and return the script's warnings and peak memory.

    The script makes its own process group. SIGTERM and SIGINT do what they do in any Python program. The function
    changes the working folder, the environment variables, sys.argv and sys.path of this process for the script. Before
    the function returns or raises, it calls the script's exit handlers. If the script calls os._exit, the function
    sends the result or failure to the launcher itself, and the process ends.

    Args:
        environment: this rank.
        link: receives a RunStarted, rank 0's figures, and from every rank signs of life.
        job: the script.

    Raises:
        SystemExit: the script has ended with an exit status other than 0, and nobody had asked it to stop.
        StopRequested: the script has ended in any way after a request to stop.
        Exception: whatever the script raises.
    """
    os.chdir(job.working_folder)
    variables = torchrun_variables(environment, job)
    os.environ.update(variables)
    os.environ.pop("TORCHELASTIC_ERROR_FILE", None)  # it is for this package's own process on many nodes
    own = {name: variables[name] for name in SCRIPT_VARIABLES}
    sys.argv = [job.script, *(fill_in(argument, own) for argument in job.arguments)]
    sys.path.insert(0, str(Path(job.script).parent))
    if job.root not in sys.path:
        sys.path.append(job.root)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    multiprocessing.set_start_method(None, force=True)  # the script may choose one
    multiprocessing.current_process().name = "MainProcess"
    world = environment.world
    hosts = [f"node {rank // world.local_size}" for rank in range(world.size)]
    hosts[: world.local_size] = [environment.host] * world.local_size  # this node alone has a name here
    link.emit(
        RunStarted(
            dataset=job.dataset, samples="", headline="loss", percent=(), train_samples=0, test_samples=0,
            samples_per_epoch=0, world_size=world.size, backend=world.backend, device=world.device,
            precision="the script's own precision", epochs=None, steps_per_epoch=None, first_epoch=0,
            first_step=job.first_step, startup_seconds=0.0, layers=[], hosts=hosts,
            identity=job.identity,
        )
    )  # fmt: skip
    companion = Companion(link, EventsFile(Path(job.events)) if environment.rank == 0 else None)
    process = os.getpid()

    def end(status: int) -> NoReturn:
        """End the process as os._exit does; the script's own process tells how before."""
        if os.getpid() == process:  # not one that the script has forked
            message: tuple[str, Any]
            try:
                refuse_status(link, SystemExit(status), "os._exit")
                message = "done", conclude(environment, link, job, companion)
            except ScriptStopped as stopped:
                message = "stopped", str(stopped)
            except SystemExit as error:
                message = "failed", from_exception(error, environment.rank, environment.host)
            link.send(*message)
            link.flush()
        EXIT(status)

    os._exit = end
    try:
        try:
            run_as_main(job.script)
        except Exception as error:
            if not link.stop_requested:  # the script's threads may wait for a rank that waits for this one
                failure = from_exception(error, environment.rank, environment.host)
                late = threading.Timer(FAREWELL_SECONDS, link.send, ("failed", failure))
                late.daemon = True
                late.start()
            raise
        finally:
            run_exit_handlers()
        return conclude(environment, link, job, companion)
    except SystemExit as error:
        refuse_status(link, error, "sys.exit")
        return conclude(environment, link, job, companion)
    except BaseException as error:
        if link.stop_requested and not isinstance(error, ScriptStopped):
            raise ScriptStopped(f"by {type(error).__name__}: {error}") from None
        raise
    finally:
        os._exit = EXIT
        companion.close()


def refuse_status(link: ParentLink, error: SystemExit, call: str) -> None:
    """Raise the error if its exit status is not 0 and nobody has asked the rank to stop."""
    if error.code not in (None, 0) and not link.stop_requested:
        error.args = (f"the script has ended by {call}({error.code!r})",)
        raise error from None


def conclude(environment: Environment, link: ParentLink, job: ScriptJob, companion: "Companion") -> ScriptResult:
    """Return the result of a script that has come to its own end.

    The function ends the companion, and marks this rank as ended in the folder job.ended. Rank 0 warns if the script
    has saved no checkpoint.

    Args:
        environment: this rank.
        link: knows whether the ranks were asked to stop.
        job: the script.
        companion: the thread that has followed the script.

    Raises:
        ScriptStopped: the script was asked to stop.
    """
    companion.close()
    Path(job.ended, str(environment.rank)).touch()
    if link.stop_requested:
        raise ScriptStopped
    if environment.rank == 0 and not any(Path(job.checkpoint_folder).glob("*")):
        companion.warn(f"the script has saved nothing in ${CHECKPOINT_VARIABLE}: after a failure it would begin anew")
    return ScriptResult(
        epochs=[], warnings=companion.warnings, headline="loss", train_samples=0, test_samples=0, precision="",
        peak_bytes=peak_memory(), peak_gpu_bytes=0,
    )  # fmt: skip


def fill_in(argument: str, values: dict[str, str]) -> str:
    """Return an argument with the values of $NAME and ${NAME} in it, and nothing else changed."""
    return re.sub(r"\$(?:(\w+)|\{(\w+)\})", lambda found: values.get(found[1] or found[2], found[0]), argument)


def torchrun_variables(environment: Environment, job: ScriptJob) -> dict[str, str]:
    """Return the environment variables that torchrun would set for this rank, and two of this package.

    The two are DDP_CHECKPOINT_DIR and DDP_EVENTS; DDP_EVENTS is /dev/null on all ranks but 0. On several nodes, the
    result lacks variables that torchrun has already set, such as the address of the store.
    """
    world = environment.world
    values: dict[str, Any] = {
        **dict.fromkeys(("RANK", "ROLE_RANK"), environment.rank),
        **dict.fromkeys(("WORLD_SIZE", "ROLE_WORLD_SIZE"), world.size),
        "LOCAL_RANK": environment.local_rank,
        "LOCAL_WORLD_SIZE": world.local_size,
        "TORCH_NCCL_ASYNC_ERROR_HANDLING": os.environ.get("TORCH_NCCL_ASYNC_ERROR_HANDLING", 1),
        CHECKPOINT_VARIABLE: job.checkpoint_folder,
        EVENTS_VARIABLE: os.devnull if environment.rank else job.events,
    }
    if world.size == world.local_size:  # on many nodes torchrun has set these
        values |= {
            "GROUP_RANK": 0,
            "GROUP_WORLD_SIZE": 1,
            "ROLE_NAME": "default",
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": job.port,
            "TORCHELASTIC_RUN_ID": job.key,
            "TORCHELASTIC_RESTART_COUNT": job.restarts,
            "TORCHELASTIC_MAX_RESTARTS": job.restarts,
            "TORCHELASTIC_USE_AGENT_STORE": False,  # rank 0 keeps the store
        }
    if world.local_size > 1:  # torchrun does the same: ranks would otherwise fight for the cores
        values["OMP_NUM_THREADS"] = os.environ.get("OMP_NUM_THREADS", 1)
    return {name: str(value) for name, value in values.items()}


def run_as_main(path: str) -> None:
    """Run a Python file as the module __main__ of this process. What the file raises is raised here.

    The module stays __main__ afterwards, so that threads and exit handlers still find it. Loader workers that are
    spawned import the file by its path, as those of `python train.py` do.
    """
    main = ModuleType("__main__")
    main.__file__ = path
    sys.modules["__main__"] = main
    exec(compile(Path(path).read_bytes(), path, "exec", dont_inherit=True), vars(main))


class Companion:
    """A thread beside the script: it gives signs of life, hands on requests to stop, and tells of the script's figures.

    Attributes:
        warnings: what was wrong with an event, one at most, or with the script's end.
    """

    def __init__(self, link: ParentLink, events: "EventsFile | None"):
        """Start the thread.

        Args:
            link: this rank's link.
            events: rank 0's events; None on other ranks.
        """
        self.warnings: list[Any] = []
        self._link = link
        self._events = events
        self._collectives = 0
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._work, name="companion", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """End the thread, and tell of the last events. A second call does nothing."""
        if not self._closing.is_set():
            self._closing.set()
            self._thread.join()
            self._tell(is_last=True)

    def warn(self, reason: str) -> None:
        """Emit a warning, which is also among the warnings of the result."""
        self.warnings.append(NotLearning(0, 0, reason))
        self._link.emit(self.warnings[-1])

    def _work(self) -> None:
        is_told = False
        while not self._closing.wait(LOOK_SECONDS):
            if self._link.stop_requested and not is_told:
                is_told = True
                self._stop()
            reached = count_collectives()
            if reached != self._collectives:
                self._collectives = reached
                self._link.heartbeat()
            self._tell()

    def _stop(self) -> None:
        """Stop the script: send this process a SIGTERM, as torchrun does.

        A script that has no handler for SIGTERM is ended without the signal: the method tells the launcher that the
        rank has stopped as asked, and exits. Death by the signal would count as a failure, and the launcher would then
        not wait for other ranks, whose handlers may be saving a checkpoint.
        """
        if signal.getsignal(signal.SIGTERM) == signal.SIG_DFL:
            self._link.send("stopped", "SIGTERM has ended the script, which has no handler for it")
            self._link.flush()
            EXIT(128 + signal.SIGTERM)
        os.kill(os.getpid(), signal.SIGTERM)

    def _tell(self, is_last: bool = False) -> None:
        """Emit a StepLogged for each new line that the script has written to $DDP_EVENTS; on rank 0 alone.

        Lines that cannot be read are left out, with a warning for the first of them.

        Args:
            is_last: whether the script has ended, so that a last line without a line break counts, too.
        """
        for line in self._events.read_lines(is_last) if self._events else ():
            found = read_event(line)
            if isinstance(found, StepLogged):
                self._link.emit(found)
            elif not self.warnings:
                self.warn(found)


class EventsFile:
    """The file to which a script appends lines of JSON, read as it grows."""

    def __init__(self, path: Path):
        """Begin behind what an earlier start of the ranks has written."""
        self._path = path
        self._read = path.stat().st_size if path.exists() else 0
        self._begun = b""

    def read_lines(self, is_last: bool = False) -> list[bytes]:
        """Return the lines that the script has written since the last call, without empty ones.

        A file that has become shorter is read anew. Without a file there are no lines.

        Args:
            is_last: whether a last line without a line break counts, too.
        """
        with suppress(FileNotFoundError), open(self._path, "rb") as file:
            if os.fstat(file.fileno()).st_size < self._read:  # the script has begun the file anew
                self._read, self._begun = 0, b""
            file.seek(self._read)
            news = file.read()
            self._read += len(news)
            *lines, self._begun = (self._begun + news).split(b"\n")
            if is_last:
                lines.append(self._begun)
            return [line for line in lines if line.strip()]
        return []


def read_event(line: bytes) -> StepLogged | str:
    """Return a line of $DDP_EVENTS as an event, or a sentence that says what is wrong with the line.

    The event's measures are the line's figures. Its learning rate, speed and gradient norm are None.

    Args:
        line: an object of JSON with a whole number "step" and figures by name. Values that are no numbers are left out.
    """
    shown = line[:100].decode("utf-8", "backslashreplace")
    try:
        content = json.loads(line)
    except (ValueError, RecursionError):
        content = None
    step = content.get("step") if isinstance(content, dict) else None
    if not isinstance(step, int) or isinstance(step, bool) or not 0 <= step < 2**53:
        return (
            f'a line of ${EVENTS_VARIABLE} must be JSON with a step, such as {{"step": 10, "loss": 1.2}}, got '
            f"{shown!r}: such lines are left out"
        )
    figures = {}
    for name, value in content.items():
        if name != "step" and type(value) in (int, float):
            with suppress(OverflowError):  # a whole number of JSON has any length
                figures[name] = float(value)
    unknown: Any = None
    return StepLogged(0, step, 0, figures, unknown, unknown, {}, unknown)
