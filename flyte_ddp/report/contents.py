"""The report's tiles and tables as plain values for its template: titles, and lines of (name, value)."""

import dataclasses
import json
from collections.abc import Iterable
from datetime import datetime, timezone
from typing import Any

from flyte_ddp.fields import Settings, find_default
from flyte_ddp.report.goodput import LABELS, compute_goodput
from flyte_ddp.report.record import Record
from flyte_ddp.report.surroundings import surroundings
from flyte_ddp.report.words import Table, capitalised, format_duration, in_words, rank_tables, time_left
from flyte_ddp.text import counted, gib, masked

MOST_MODULES = 40
MOST_MEASURES = 4  # in a table
MOST_EPOCHS = 20  # lines in a table
MOST_SHOWN = 15
MOST_RANKS = 16  # lines in a table
MOST_ATTEMPTS = 8


def tiles(record: Record) -> list[tuple[str, str]]:
    """Return (value, label), both texts, of each key number at the top of the page, the most important first.

    First come the headline and the loss, on the test split if that has been evaluated. Otherwise, they are those of the
    chosen epoch or, if no epoch is chosen, of the last one. Before the first evaluation, there is one dash. The run of
    a script has its newest figures instead, at most MOST_MEASURES.

    Then come, as far as they are known, the chosen epoch, the seconds of training, the speed, the time left, the ranks
    and the total time.
    """
    run = record.started
    description = record.info.description
    tested = record.tested
    split = record.split
    if run and not run.epochs:
        figures = record.newest.measures if record.newest else {}
        names = [*figures][:MOST_MEASURES]
        shown = [(record.format_measure(name, figures), f"{in_words(name)}, newest") for name in names]
        shown = shown or [("-", "figures, until the script tells some")]
    elif not record.epochs:
        shown = [("-", f"{split} {in_words(record.headline)}, after the first epoch")]
    else:
        is_tested = tested is not None and bool(tested.measures)  # a loop of one's own may choose, and not test
        chosen = [epoch for epoch in record.epochs if tested and epoch.position == tested.position]
        measures = tested.measures if tested and is_tested else (chosen or record.epochs)[-1].evaluated
        shown = []
        for name in dict.fromkeys((record.headline, "loss")):
            label = f"{'test' if is_tested else split} {in_words(name)}"
            if name == "accuracy" and description and name in measures and (is_tested or split == "test"):
                wrong = (1 - measures[name]) * description.test_samples
                label += f" ({wrong:,.0f} of {description.test_samples:,} wrong)"
            shown.append((record.format_measure(name, measures), label))
        if tested:
            early = "; stopped early" if tested.stopped_early else ""
            kind = "the best on the validation split" if tested.is_best else "the last"
            shown.append((f"epoch {counted(tested.position)}", f"is {kind}{early}"))
        seconds = sum(epoch.train_seconds for epoch in record.epochs)
        trained = f"{counted(record.epochs[-1].position)} of {record.info.settings.epochs}"
        known = {epoch.position for epoch in record.epochs}
        before = [position for position, _ in run.earlier if position not in known] if run else []
        since = f" since epoch {counted(max(before))}" if before else ""  # until it ends, a resumed run knows no more
        shown.append((format_duration(seconds), f"training{since}, {trained} epochs"))
        rate = sum(epoch.samples for epoch in record.epochs) / max(seconds, 1e-9)
        shown.append((f"{rate:,.0f}", f"{record.samples} per second"))
    if run and not record.finished and (left := time_left(run, record.seconds_left)):
        shown.append((left, f"at {datetime.now(timezone.utc):%H:%M:%S} UTC"))
    if run:
        ranks = f"{run.world_size} rank" + "s" * (run.world_size != 1)
        shown.append((ranks, f"{run.backend}, {run.device}, {run.precision}"))
    if record.finished:
        shown.append((format_duration(record.finished.total_seconds), "total"))
    return shown


def epoch_table(record: Record) -> Table:
    """Return a table of the last MOST_EPOCHS evaluations, oldest first; without lines before the first evaluation.

    A line has the epoch, the measures of the evaluation and of the training before it (the first MOST_MEASURES of
    record.measures), the seconds of training, and the digest of the weights.
    """
    names = record.measures[:MOST_MEASURES]
    evaluated = [f"{capitalised(record.split)} {in_words(name)}" for name in names]
    trained = [f"Training {in_words(name)}" for name in names]
    lines = [
        [
            counted(epoch.position),
            *(record.format_measure(name, epoch.evaluated) for name in names),
            *(record.format_measure(name, epoch.train) for name in names),
            f"{epoch.train_seconds:.1f}",
            epoch.digest or "-",
        ]
        for epoch in record.epochs[-MOST_EPOCHS:]
    ]
    left_out = len(record.epochs) - len(lines)
    title = f"Epochs, without the first {left_out} evaluations" if left_out else "Epochs"
    return Table(title, ["Epoch", *evaluated, *trained, "Seconds of training", "Weights"], lines)


def kept_table(record: Record) -> Table | None:
    """Return a table of the evaluations whose weights options.keep_best has left in the run's logs, the best first.

    Returns None if there are no such weights, or if the training has not finished.
    """
    if not record.kept:
        return None
    measure = record.kept[0].measure
    lines = [
        [one.file, counted(one.epoch), record.format_measure(measure, {measure: one.value})] for one in record.kept
    ]
    return Table("Best evaluations, in the logs", ["File", "Epoch", f"Validation {in_words(measure)}"], lines)


def cause_bars(record: Record) -> list[tuple[str, list[str], float]]:
    """Return (label, [seconds as text], percent of the longest cause) for each cause that has taken seconds."""
    seconds = record.goodput.seconds
    most = max(seconds.values(), default=0.0) or 1.0
    return [(LABELS[cause], [f"{value:,.2f}"], round(100 * value / most, 1)) for cause, value in seconds.items()]


def attempts_table(record: Record) -> dict[str, Any] | None:
    """Return the seconds by cause of each of the last MOST_ATTEMPTS attempts, for a bar chart and a table.

    Returns:
        None if there was only one attempt. Otherwise a dict:

        - "title": the title of both.
        - "bars": for each attempt, its name and pairs (cause, seconds in per cent of the longest attempt's).
        - "legend": pairs (cause, label).
        - "heads" and "lines": the table, with a column for each attempt, a line for each cause, and a line of sums.
    """
    attempts = record.goodput.attempts
    if len(attempts) == 1:
        return None
    causes = [cause for cause in LABELS if cause in record.goodput.seconds]
    numbered = [*enumerate(attempts, 1)][-MOST_ATTEMPTS:]
    most = max(sum(attempt.seconds.values()) for _, attempt in numbered) or 1.0
    names = [f"{number}, {datetime.fromtimestamp(one.began, timezone.utc):%d %b %H:%M}" for number, one in numbered]
    shares = [[(cause, round(100 * one.seconds[cause] / most, 2)) for cause in causes] for _, one in numbered]
    lines = [[LABELS[cause], *(f"{one.seconds[cause]:,.1f}" for _, one in numbered)] for cause in causes]
    lines.append(["All", *(f"{sum(one.seconds.values()):,.1f}" for _, one in numbered)])
    return {
        "title": f"Seconds of {len(attempts)} attempts, goodput {compute_goodput(record.goodput.seconds):.1%}",
        "heads": ["Cause", *(f"Attempt {number}" for number, _ in numbered)],
        "lines": lines,
        "bars": list(zip(names, shares, strict=True)),
        "legend": [(cause, LABELS[cause]) for cause in causes],
    }


def ranks(record: Record) -> list[Table]:
    """Return tables of the seconds of each rank, and of each of several hosts; none before the ranks were timed."""
    if record.started is None or record.ranks is None:
        return []
    return rank_tables(record.started.hosts, record.ranks, MOST_RANKS)


def data_lines(record: Record) -> list[tuple[str, Any]]:
    """Return (label, value) pairs that describe the data.

    Returns:
        For an image dataset: name, counts, shape, classes, mean and standard deviation, remarks and digest. For other
        data: the name and the number of samples of each split; [] until the training has started.
    """
    run = record.started
    description = record.info.description
    if description is None:
        if run is None:
            return []
        counts = {"Training": run.train_samples, "Validation": run.validation_samples, "Test": run.test_samples}
        lines = [(f"{split} {run.samples}", f"{count:,}") for split, count in counts.items() if count]
        return [("Name", run.dataset), *lines]
    return [
        ("Name", description.name + (" (stand-in)" if record.info.is_stand_in else "")),
        ("Training images", f"{description.train_samples:,}"),
        *([("Held out for validation", f"{run.validation_samples:,}")] if run and run.validation_samples else []),
        ("Test images", f"{description.test_samples:,}"),
        ("Image", " x ".join(map(str, description.image_shape)) + " (channels, height, width)"),
        ("Classes", len(description.classes)),
        ("Mean, standard deviation", f"{_list(description.mean)}; {_list(description.std)}"),
        *description.remarks.items(),
        ("SHA-256", description.digest),
    ]


def setup_tables(record: Record) -> dict[str, Iterable[tuple[Any, ...]]]:
    """Return the tables of the set-up by title: hyperparameters, network, options, machine and this run.

    The network is missing until the training has started. A table's lines are (label, value). In the tables of
    hyperparameters and options they are (label, value, default), with "" if the value is the default.
    """
    info = record.info
    run = record.started
    machines = run.ran_on if run else []
    written = f"{record.checkpoints} written in {record.write_seconds:.2f} s"
    lines = [
        ("Run", info.name),
        ("Recipe", info.recipe),
        ("Training", info.tracking_id),
        ("Digest of the weights", record.digest or "-"),
        *(("Ran on", "; ".join(f"{name} {value}" for name, value in machine.items())) for machine in machines),
        ("Retries before this attempt", info.attempt),
        ("Resumed", "yes" if run and (run.first_epoch or run.first_step) else "no"),
        ("Checkpoints", f"{written}, training waited {record.stall_seconds:.2f} s"),
        ("Checkpoint, for resume_from", info.checkpoint),
        *_memory(record),
    ]
    return {
        "Hyperparameters": _settings(info.settings),
        **({"Network": network} if (network := _network(record)) else {}),
        "Options": _settings(info.options),
        "Versions and machine": surroundings().items(),
        "This run": lines,
    }


def _network(record: Record) -> list[tuple[str, str]]:
    lines = []
    if record.finished and record.finished.results[0].parameters:
        result = record.finished.results[0]
        lines.append(("All", f"{result.parameters:,} parameters"))
        if result.sample_flops:
            lines.append(("A training step", f"{result.sample_flops:,.3g} FLOPs per sample"))
    layers = record.started.layers[:MOST_MODULES] if record.started else []
    return lines + [(name or "(the network)", f"{kind}, {count:,} parameters") for name, kind, count in layers]


def _memory(record: Record) -> list[tuple[str, str]]:
    """Return (label, text) of the peak memory of a rank on the host, then on the GPU; [] until training has finished.

    Each is the maximum over the ranks whose results the record has. A peak of 0, as without GPUs, is left out.
    """
    results = record.finished.results if record.finished else []
    peaks = {
        "Peak memory of a rank": max((result.peak_bytes for result in results), default=0),
        "Peak GPU memory of a rank": max((result.peak_gpu_bytes for result in results), default=0),
    }
    return [(label, gib(peak)) for label, peak in peaks.items() if peak]


def _settings(values: Settings) -> list[tuple[str, str, str]]:
    """Return (name, value, default) of each field. The default is "" if the field has none, or has it as its value."""
    lines = []
    for field in dataclasses.fields(values):  # type: ignore[arg-type]
        value = getattr(values, field.name)
        default = find_default(field)
        is_other = default not in (value, dataclasses.MISSING)
        lines.append((field.name, _text(value), _text(default) if is_other else ""))
    return lines


def operator_table(record: Record) -> Table | None:
    """Return a table of rank 0's MOST_SHOWN most expensive operators, from profile/operators.json in the logs.

    Returns None if there is no such file, because the profiler was off.
    """
    try:
        profile = json.loads((record.info.logs / "profile" / "operators.json").read_text())
    except FileNotFoundError:
        return None
    columns = {"CPU ms, self": "self_cpu_us", "CPU ms, total": "cpu_us"}
    if any(operator["device_us"] for operator in profile["operators"]):
        columns["GPU ms, self"] = "device_us"
    lines = [
        [operator["name"], f"{operator['calls']:,}", *(f"{operator[key] / 1e3:,.2f}" for key in columns.values())]
        for operator in profile["operators"][:MOST_SHOWN]
    ]
    title = f"Most expensive operators of rank 0, over {profile['steps']} profiled steps"
    return Table(title, ["Operator", "Calls", *columns], lines)


def _list(values: Any) -> str:
    return ", ".join(f"{value:g}" for value in values)


def _text(value: Any) -> str:
    return json.dumps(value) if isinstance(value, bool) or value == "" else masked(str(value))
