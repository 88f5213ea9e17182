"""The report's tiles and tables, as plain values for its template."""

import dataclasses
import json
from collections.abc import Mapping
from typing import Any

from flyte_ddp.report.record import Record
from flyte_ddp.report.words import capitalised, in_words
from flyte_ddp.settings import Settings

MOST_BARS = 40
MOST_MEASURES = 4  # in a table
MOST_EPOCHS = 20  # lines in a table
MOST_OPERATORS = 15


def tiles(record: Record) -> list[dict[str, str]]:
    """The figures at the top, the most important first."""
    run, description = record.started, record.info.description
    shown = []
    tested, split = record.tested, record.split
    if record.epochs:
        measures = tested.measures if tested else record.epochs[-1].evaluated
        for name in dict.fromkeys((record.headline, "loss")):
            label = f"{'test' if tested else split} {in_words(name)}"
            if name == "accuracy" and description and name in measures and (tested or split == "test"):
                wrong = (1 - measures[name]) * description.test_samples
                label += f" ({wrong:,.0f} of {description.test_samples:,} wrong)"
            shown.append((_written(record, name, measures), label))
        if tested:
            early = "; stopped early" if tested.stopped_early else ""
            kind = "the best on the validation split" if tested.is_best else "the last"
            shown.append((f"epoch {tested.epoch + 1}", f"is {kind}{early}"))
        seconds = sum(epoch.train_seconds for epoch in record.epochs)
        shown.append((duration(seconds), f"training, {len(record.epochs)} of {record.info.settings.epochs} epochs"))
        rate = sum(epoch.samples for epoch in record.epochs) / max(seconds, 1e-9)
        shown.append((f"{rate:,.0f}", f"{record.samples} per second"))
    else:
        shown.append(("-", f"{split} {in_words(record.headline)}, after the first epoch"))
    if run:
        ranks = f"{run.world_size} rank" + "s" * (run.world_size != 1)
        shown.append((ranks, f"{run.backend}, {run.device}, {run.precision}"))
    if record.finished:
        shown.append((duration(record.finished.total_seconds), "total"))
    return [{"value": value, "label": label} for value, label in shown]


def epoch_heads(record: Record) -> list[str]:
    names = [in_words(name) for name in record.measures[:MOST_MEASURES]]
    split = capitalised(record.split)
    return ["Epoch", *(f"{split} {name}" for name in names), *(f"Training {name}" for name in names), "Seconds"]


def epoch_lines(record: Record) -> list[list[str]]:
    """The last epochs' figures as a table."""
    names = record.measures[:MOST_MEASURES]
    return [
        [
            str(epoch.epoch + 1),
            *(_written(record, name, measures) for measures in (epoch.evaluated, epoch.train) for name in names),
            f"{epoch.train_seconds + epoch.evaluate_seconds:.1f}",
        ]
        for epoch in record.epochs[-MOST_EPOCHS:]
    ]


def _written(record: Record, name: str, measures: Mapping[str, float]) -> str:
    return record.written(name, measures[name]) if name in measures else "-"


def phase_bars(record: Record) -> list[dict[str, Any]]:
    """Each phase's seconds, and them as a share of the longest one's, in percent."""
    phases = record.phases()
    most = max((seconds for _, seconds in phases), default=0) or 1
    return [
        {"label": name, "values": [f"{seconds:.2f}"], "share": f"{100 * seconds / most:.1f}"}
        for name, seconds in phases
    ]


def memory_lines(record: Record) -> list[tuple[str, str]]:
    """Known once training has finished."""
    results = record.finished.results if record.finished else []
    peaks = {
        "Memory of a rank, at most": [result.peak_bytes for result in results],
        "GPU memory of a rank, at most": [result.peak_gpu_bytes for result in results],
    }
    return [(label, gibibytes(max(counts))) for label, counts in peaks.items() if any(counts)]


def _cost(record: Record) -> list[tuple[str, str]]:
    if not record.finished:
        return []
    result = record.finished.results[0]
    flops = [("A training step", f"{result.sample_flops:,.3g} FLOPs per sample")] if result.sample_flops else []
    return [("All", f"{result.parameters:,} parameters"), *flops]


def data_lines(record: Record) -> list[Any]:
    """A description of the images and their digest; for other recipes, the number of samples."""
    run, description = record.started, record.info.description
    if description is None:
        if run is None:
            return []
        counts = {"Training": run.train_samples, "Validation": run.validation_samples, "Test": run.test_samples}
        numbers = [(f"{split} {run.samples}", f"{count:,}") for split, count in counts.items() if count]
        return _plain([("Name", run.dataset), *numbers])
    lines = [
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
    return _plain(lines)


def setup_tables(record: Record) -> list[dict[str, Any]]:
    """Hyperparameters and options, with differences from the defaults marked; the network; the machine; the run."""
    info, run = record.info, record.started
    tables = [
        {"title": "Hyperparameters", "lines": _settings(info.settings)},
        {"title": "Options", "lines": _settings(info.options)},
        {"title": "Versions and machine", "lines": _plain(info.surroundings.items())},
    ]
    if run:
        layers = [(name or "(the network)", f"{kind}, {count:,} parameters") for name, kind, count in run.layers]
        tables.insert(1, {"title": "Network", "lines": _plain([*_cost(record), *layers[:MOST_BARS]])})
    checkpoints = (
        f"{record.checkpoints} written in {record.write_seconds:.2f} s, training waited {record.stall_seconds:.2f} s"
    )
    resumed = bool(run and (run.first_epoch or run.first_step))
    lines = [
        ("Run", info.name),
        ("Recipe", info.recipe),
        ("Training", info.tracking_id),
        ("Retries before this attempt", info.attempt),
        ("Resumed", "yes" if resumed else "no"),
        ("Checkpoints", checkpoints),
        *memory_lines(record),
    ]
    return [*tables, {"title": "This run", "lines": _plain(lines)}]


def operator_table(record: Record) -> dict[str, Any]:
    """What rank 0's profiler wrote, if it was on."""
    try:
        profile = json.loads((record.info.logs / "profile" / "operators.json").read_text())
    except FileNotFoundError:
        return {}
    has_device = any(operator["device_us"] for operator in profile["operators"])
    heads = ["Operator", "Calls", "CPU ms, self", "CPU ms, total"] + (["GPU ms, self"] if has_device else [])
    lines = [
        [operator["name"], f"{operator['calls']:,}", f"{operator['self_cpu_us'] / 1e3:,.2f}"]
        + [f"{operator['cpu_us'] / 1e3:,.2f}"]
        + ([f"{operator['device_us'] / 1e3:,.2f}"] if has_device else [])
        for operator in profile["operators"][:MOST_OPERATORS]
    ]
    title = f"Most expensive operators of rank 0, over {profile['steps']} profiled steps"
    return {"operators": {"title": title, "heads": heads, "lines": lines}}


def _settings(values: Settings) -> list[Any]:
    """Name, value, and the default if the value differs from it."""
    return [
        (name, _text(value), _text(default) if value != default else "")
        for name, default in dataclasses.asdict(type(values)()).items()  # type: ignore[call-overload]
        for value in [getattr(values, name)]
    ]


def _plain(lines: Any) -> list[Any]:
    """Name and value, without a default."""
    return [(name, value, "") for name, value in lines]


def duration(seconds: float) -> str:
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, seconds = divmod(round(seconds), 60)
    return f"{minutes} min {seconds} s" if minutes < 60 else f"{minutes // 60} h {minutes % 60} min"


def gibibytes(count: float) -> str:
    return f"{count / 2**30:.2f} GiB"


def _list(values: Any) -> str:
    return ", ".join(f"{value:g}" for value in values)


def _text(value: Any) -> str:
    return json.dumps(value) if isinstance(value, bool) or value == "" else str(value)
