"""The closing summary of a run: results, times, files, and a command to try next."""

from pathlib import Path

from flyte_ddp.report.console import say, say_last
from flyte_ddp.report.goodput import spent
from flyte_ddp.report.record import Record, RunInfo
from flyte_ddp.report.words import capitalised, in_words, split_sizes
from flyte_ddp.text import counted

MOST_SAID = 10


def say_interrupted(checkpoint: Path) -> None:
    """After Ctrl-C or a SIGTERM, of which a command says no more than that it was aborted, or stopped."""
    if checkpoint.exists():
        say(f"Interrupted; the same command resumes from {checkpoint}")


def say_summary(record: Record, model: Path, report: Path, show_paths: bool) -> None:
    """Prints the summary of a finished run. show_paths: whether its files stay where they are, as in a local run."""
    info, run = record.info, record.started
    name = record.headline
    tested = [record.written(name, epoch.evaluated) for epoch in record.epochs]
    if len(tested) > MOST_SAID:
        tested = [tested[0], "…", *tested[-MOST_SAID + 1 :]]
    lines = []
    if run:
        stand_in = " (stand-in)" if info.is_stand_in else ""
        lines.append(("Data", f"{run.dataset}, {split_sizes(run)}{stand_in}"))
    by = "epoch by epoch" if all(epoch.fraction == 1 for epoch in record.epochs) else "evaluation by evaluation"
    if any(epoch.evaluated for epoch in record.epochs):  # a LightningModule may do without
        lines.append((capitalised(in_words(name)), f"{', '.join(tested)} on the {record.split} {record.samples}, {by}"))
    lines.append(("Seconds", spent(record.goodput.seconds)))
    if record.tested:
        chosen, value = "Chosen" if record.tested.is_best else "Last", record.written(name, record.tested.measures)
        lines.insert(-1, (chosen, f"epoch {counted(record.tested.position)}; {value} on the test {record.samples}"))
    for one in record.kept[:MOST_SAID]:
        value = f"{in_words(one.measure)} {record.written(one.measure, {one.measure: one.value})}"
        file = info.logs / one.file if show_paths else one.file
        lines.append(("Kept", f"{file}, {value} on the validation {record.samples}"))
    if record.digest:
        lines.append(("Weights", record.digest))
    lines += [("Warning", warning.reason) for warning in record.problems]
    if show_paths:
        lines += [("Model", str(model)), ("Report", str(report)), ("Next", next_step(info, report))]
    width = max(len(label) for label, _ in lines) + 2
    say_last("\n" + "\n".join(f"{label + ':':<{width}}{text}" for label, text in lines))


def next_step(info: RunInfo, report: Path) -> str:
    """A command that suits this run."""
    if info.options.tracking == "tensorboard":
        return f"tensorboard --logdir {info.logs}"
    if info.options.tracking == "offline":
        return f"wandb sync {info.logs}/wandb/offline-run-*"
    return f"python3 -m webbrowser {report.as_uri()}"
