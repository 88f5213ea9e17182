"""The lines that a training run prints on the terminal or in a pod's log."""

import logging
import os
import sys
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import click

from flyte_ddp import events
from flyte_ddp.data.sources.download import Progress
from flyte_ddp.report.goodput import format_seconds
from flyte_ddp.report.record import Record, RunInfo
from flyte_ddp.report.words import (
    Table,
    capitalised,
    format_measure,
    format_table,
    in_words,
    rank_tables,
    split_sizes,
    start_position,
    time_left,
)
from flyte_ddp.text import counted, masked

logger = logging.getLogger("flyte_ddp")
_last_words: list[str] = []
MOST_RANKS = 4  # lines in a table
MOST_SAID = 10  # evaluations in a summary


class Terminal(logging.Handler):
    """A logging handler that prints messages on standard error, with "Warning: " before warnings.

    A message that cannot be written ends no training: the disk of its log may be full, or its terminal closed.

    Attributes:
        is_lost: whether the newest message could not be written.
    """

    is_lost = False

    def emit(self, record: logging.LogRecord) -> None:
        # Standard output is for the workflow's result. With err=True, click would bypass rich, which keeps printed
        # lines above the live one
        warning = "Warning: " if record.levelno >= logging.WARNING else ""
        try:
            click.echo(f"{warning}{self.format(record)}", file=sys.stderr)
            self.is_lost = False
        except OSError:
            self.is_lost = True


def is_shown() -> bool:
    """Return whether the newest message could be written."""
    return not any(isinstance(handler, Terminal) and handler.is_lost for handler in logger.handlers)


def show_output() -> None:
    """Print the library's messages, unless its logger already has a handler. Commands and tasks call this first."""
    if not logger.handlers:
        logger.addHandler(Terminal())
        logger.propagate = False  # a handler of the root logger would print the messages again
    if logger.level == logging.NOTSET:
        logger.setLevel(logging.INFO)


def say(text: str, level: int = logging.INFO) -> None:
    """Print a message by the library's logger, without the passwords in it, after what say_last has put off."""
    _say_last_words()
    logger.log(level, masked(text))


def warn(text: str) -> None:
    say(text, logging.WARNING)


def say_last(text: str) -> None:
    """Print the text when the click command ends, after the long line of outputs of `pyflyte run`.

    If any other message is printed before the command ends, the text is printed just before that message. If no command
    runs, the text is printed at once.
    """
    command = click.get_current_context(silent=True)
    if command is None:
        say(text)
        return
    _say_last_words()
    _last_words.append(text)
    command.call_on_close(_say_last_words)


def _say_last_words() -> None:
    while _last_words:
        logger.info(masked(_last_words.pop()))


def on_terminal() -> bool:
    return sys.stderr.isatty() and os.environ.get("TERM") != "dumb"


def open_console(report: str = "") -> "Console":
    """Return one live line on a user's own terminal, and plain lines elsewhere or where a launcher's ranks share one.

    Args:
        report: the address of the report that is written meanwhile, if it can be opened.
    """
    return LiveConsole(report) if on_terminal() and "WORLD_SIZE" not in os.environ else Console(report)


class Remarks(events.Observer):
    """An observer that prints what all trainings have: warnings, output of ranks, and failed or refused checkpoints."""

    def on_not_learning(self, event: events.Warned) -> None:
        warn(event.reason)

    on_slow_rank = on_not_learning

    def on_printed(self, event: events.Printed) -> None:
        say(f"[rank {event.rank}] {event.text}")

    def on_checkpoint_failed(self, event: events.CheckpointFailed) -> None:
        warn(f"no checkpoint could be written: {event.reason}")

    def on_checkpoint_refused(self, event: events.CheckpointRefused) -> None:
        say(f"Starting afresh: {event.reason}")

    def on_ranks_restarted(self, event: events.RanksRestarted) -> None:
        warn(f"the ranks start again from the checkpoint: {event.reason}")


class Console(Remarks):
    """An observer that prints a line per logged step and per epoch, in the tutorial's format."""

    def __init__(self, report: str = "") -> None:
        self._report = report
        self._run: events.RunStarted
        self._ranks: list[Table] = []
        self._has_slow_rank = False

    def on_start_up(self, event: events.StartUp) -> None:
        say(f"Starting: {event.doing}")

    def on_run_started(self, event: events.RunStarted) -> None:
        self._run = event
        self._ranks = []
        hosts = len({*event.hosts})
        sizes = split_sizes(event)
        say(
            f"{event.dataset}: {sizes}{'; ' * bool(sizes)}{event.world_size} rank{'s' * (event.world_size > 1)} "
            f"{f'on {hosts} hosts ' * (hosts > 1)}"
            f"({event.backend}, {event.device}, {event.precision}), ready after {event.startup_seconds:.1f} s"
        )
        if self._report:
            say(f"Live report: {self._report}")
        for remark in event.remarks:
            say(remark)
        if event.first_epoch or event.first_step:
            say(": ".join(filter(None, ["resuming from the checkpoint", start_position(event)])))

    def on_epoch_finished(self, event: events.EpochFinished) -> None:
        measured = self._measured(event.split, event.evaluated)
        parts = [measured] if measured else []
        parts.append(f"{event.train_seconds:.1f} s of training")
        if event.digest:
            parts.append(f"weights {event.digest}")
        say(f"Epoch {counted(event.position)} of {self._run.epochs}: {', '.join(parts)}")

    def on_slow_rank(self, event: events.Warned) -> None:
        super().on_slow_rank(event)
        self._has_slow_rank = True

    def on_ranks_timed(self, event: events.RanksTimed) -> None:
        self._ranks = rank_tables(self._run.hosts, event, MOST_RANKS) if len(event.data) > 1 else []

    def say_ranks(self) -> None:
        """Print the newest tables of ranks' and hosts' seconds. A second call prints nothing."""
        for table in self._ranks:
            say(format_table(table))
        self._ranks = []

    def close(self) -> None:
        """Print where the seconds have gone if that is worth seeing: with several hosts, or a slow rank."""
        if self._has_slow_rank or len(self._ranks) > 1:
            self.say_ranks()

    def on_epoch_chosen(self, event: events.EpochChosen) -> None:
        early = f"Stopped early after epoch {counted(event.epochs)}. " if event.stopped_early else ""
        chosen = "Best on the validation split" if event.is_best else "Last"
        gives = f", which gives {self._measured('test', event.measures)}" if event.measures else ""
        say(f"{early}{chosen}: epoch {counted(event.position)}{gives}")

    def on_step_logged(self, event: events.StepLogged) -> None:
        if not self._run.steps_per_epoch:
            say("\t".join([f"Step {event.step}", *script_figures(event)]))
            return
        done = event.step / self._run.steps_per_epoch
        left = time_left(self._run, event.seconds_left)
        others = [
            f"{capitalised(in_words(name))}: {format_measure(name, value, self._run.percent)}"
            for name, value in event.measures.items()
            if name != "loss"
        ]
        say(
            f"Train Epoch: {event.epoch + 1} [{event.samples}/{self._run.samples_per_epoch} ({done:.0%})]"
            f"\tLoss: {event.measures['loss']:.6f}"
            + "".join(f"\t{text}" for text in (*others, *_speeds(event), left) if text)
        )

    def _measured(
        self, split: str, measures: Mapping[str, float], decimals: int = 4, others: Iterable[str] = ()
    ) -> str:
        """Format the run's headline, the loss and further measures: "test accuracy 98.10%, test loss 0.0512".

        Args:
            split: the word before each measure; "" for none.
            measures: the values by name. A measure without a value is left out.
            decimals: the decimals of a loss. A percentage has two less.
            others: the names of the further measures.
        """
        return ", ".join(
            f"{split} {in_words(name)} {format_measure(name, measures[name], self._run.percent, decimals)}".lstrip()
            for name in dict.fromkeys((self._run.headline, "loss", *others))
            if name in measures
        )


def script_figures(event: events.StepLogged) -> list[str]:
    """Format the figures of a script's step, each with its name."""
    return [f"{in_words(name)} {format_measure(name, value, ())}" for name, value in event.measures.items()]


def _speeds(event: events.StepLogged) -> list[str]:
    """Return the tokens per second and the MFU of the latest steps, where they are known."""
    tokens = [] if event.tokens_per_second is None else [f"{event.tokens_per_second:,.0f} tokens/s"]
    return tokens if event.mfu is None else [*tokens, f"MFU {event.mfu:.1%}"]


class LiveConsole(Console):
    """A console that updates one line instead of printing one per logged step. Other lines scroll above it."""

    def __init__(self, report: str = "") -> None:
        super().__init__(report)
        from rich.progress import BarColumn

        self._progress = _progress(BarColumn(bar_width=None), "{task.fields[left]}")
        self._progress.start()
        self._task = self._progress.add_task("Starting", total=None, left="")

    def on_start_up(self, event: events.StartUp) -> None:
        self._progress.update(self._task, description=f"Starting: {event.doing}")

    def on_run_started(self, event: events.RunStarted) -> None:
        super().on_run_started(event)
        steps = event.steps_per_epoch or 0
        self._progress.update(
            self._task,
            description=f"Epoch {event.first_epoch + 1}/{event.epochs}" if steps else "Running the script",
            total=steps * (event.epochs or 0) or None,
            completed=event.first_epoch * steps + event.first_step,
            left="",
        )

    def on_step_logged(self, event: events.StepLogged) -> None:
        run = self._run
        if not run.steps_per_epoch:
            self._progress.update(self._task, description=", ".join([f"Step {event.step}", *script_figures(event)]))
            return
        measured = self._measured("", event.measures, 3, event.measures)
        position = f"Epoch {event.epoch + 1}/{run.epochs}, step {event.step}/{run.steps_per_epoch}"
        speed = f"{event.samples_per_second:,.0f} {run.samples}/s"
        self._progress.update(
            self._task,
            completed=event.epoch * run.steps_per_epoch + event.step,
            description=", ".join([position, measured, speed, *_speeds(event)]),
            left=time_left(run, event.seconds_left),
        )

    def close(self) -> None:
        with suppress(OSError):  # the terminal may be closed
            self._progress.stop()
        super().close()


def say_interrupted(checkpoint: Path, resume: bool) -> None:
    """Print how to continue after Ctrl-C or a SIGTERM. The command itself only says that it was aborted, or stopped."""
    if checkpoint.exists():
        say(f"Interrupted; {advise_resume(checkpoint, resume)}")


def advise_resume(checkpoint: Path, resume: bool) -> str:
    """Return a clause that says which command continues from a checkpoint.

    Args:
        checkpoint: the checkpoint that an interrupted command has left.
        resume: options.resume of that command. If it is False, the same command would remove the checkpoint, so the
            clause adds "with resume: true".
    """
    change = "" if resume else " with resume: true"
    return f"the same command{change} resumes from {checkpoint}"


def say_summary(record: Record, model: Path, report: Path, show_paths: bool) -> None:
    """Print the summary of a finished run: results, times, files, and a command to try next.

    The summary appears at the end of the command, by say_last().

    Args:
        record: the run.
        model: the path of the weights.
        report: the path of the report.
        show_paths: whether to print paths and the next command. The run's files must then stay where they are, as in a
            local run.
    """
    info = record.info
    run = record.started
    name = record.headline
    tested = [record.format_measure(name, epoch.evaluated) for epoch in record.epochs]
    if len(tested) > MOST_SAID:
        tested = [tested[0], "…", *tested[-MOST_SAID + 1 :]]
    lines = []
    if run and run.epochs:
        stand_in = " (stand-in)" if info.is_stand_in else ""
        lines.append(("Data", f"{run.dataset}, {split_sizes(run)}{stand_in}"))
    elif record.newest:
        lines.append(("Figures", ", ".join([f"step {record.newest.step}", *script_figures(record.newest)])))
    by = "epoch by epoch" if all(epoch.fraction == 1 for epoch in record.epochs) else "evaluation by evaluation"
    if any(epoch.evaluated for epoch in record.epochs):  # a LightningModule may evaluate nothing
        lines.append((capitalised(in_words(name)), f"{', '.join(tested)} on the {record.split} {record.samples}, {by}"))
    lines.append(("Seconds", format_seconds(record.goodput.seconds)))
    if record.tested:
        chosen = "Chosen" if record.tested.is_best else "Last"
        value = f"epoch {counted(record.tested.position)}"
        if record.tested.measures:  # a loop of one's own may choose, and not test
            value += f"; {record.format_measure(name, record.tested.measures)} on the test {record.samples}"
        lines.insert(-1, (chosen, value))
    for one in record.kept[:MOST_SAID]:
        value = f"{in_words(one.measure)} {record.format_measure(one.measure, {one.measure: one.value})}"
        file = info.logs / one.file if show_paths else one.file
        lines.append(("Kept", f"{file}, {value} on the validation {record.samples}"))
    if record.digest:
        lines.append(("Weights", record.digest))
    lines += [("Warning", warning.reason) for warning in record.problems]
    if show_paths:
        files = ("Model", str(model)) if run and run.epochs else ("Files", str(model.parent))
        lines += [files, ("Report", str(report)), ("Next", next_step(info, report))]
    width = max(len(label) for label, _ in lines) + 2
    say_last("\n" + "\n".join(f"{label + ':':<{width}}{text}" for label, text in lines))


def next_step(info: RunInfo, report: Path) -> str:
    """Return a shell command to try next: it shows the run in TensorBoard, sends it to W&B, or opens the report."""
    if info.options.tracking == "tensorboard":
        return f"tensorboard --logdir {info.logs}"
    if info.options.tracking == "offline":
        return f"wandb sync {info.logs}/wandb/offline-run-*"
    return f"python3 -m webbrowser {report.as_uri()}"


@contextmanager
def download_progress() -> Iterator[Progress]:
    """Show the progress of downloads while the block runs.

    On a terminal, each file has a live line. Elsewhere, a line is printed when a file's bytes_done is 0.

    Yields:
        A function to call as show(filename, bytes_done, bytes_total) when a download begins, and whenever it has
        advanced. bytes_total may be None.
    """
    if not on_terminal():
        yield _plain_download
        return
    from rich.progress import BarColumn, DownloadColumn, TimeRemainingColumn, TransferSpeedColumn

    tasks: dict[str, Any] = {}
    with _progress(BarColumn(), DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn()) as progress:

        def show(filename: str, done: int, total: int | None) -> None:
            if filename not in tasks:
                tasks[filename] = progress.add_task(filename)
            progress.update(tasks[filename], completed=done, total=total)

        yield show


def _plain_download(filename: str, done: int, total: int | None) -> None:
    if done == 0:
        say(f"Downloading {filename}" + (f" ({total / 1e6:.1f} MB)" if total else ""))


def _progress(*columns: Any) -> Any:
    """Return a progress display of rich on standard error, for a `with` block or for its start() and stop().

    Each task that is added to the display has a line: the task's description, then the columns.

    Args:
        columns: columns of rich, or formats for columns.
    """
    from rich.console import Console as Terminal
    from rich.progress import Progress as Display
    from rich.progress import TextColumn

    # Four times per second: each refresh costs the ranks a millisecond
    said = (TextColumn("{task.description}", markup=False), *columns)
    return Display(*said, console=Terminal(stderr=True), transient=True, refresh_per_second=4, expand=True)
