"""What the report says, part by part, as plain values for its template: the figures' curves, and tables."""

import dataclasses
import json
from typing import Any, Dict, List

from flyte_ddp.observers.figures import Curves
from flyte_ddp.observers.record import Record
from flyte_ddp.training.settings import Settings

MOST_BARS = 40
MOST_EPOCHS = 20  # lines in a table
MOST_OPERATORS = 15
MOST_LAYERS = 12  # curves in a figure


def tiles(record: Record) -> List[Dict[str, str]]:
    """The headline's figures, the most important first."""
    run, description = record.started, record.setting.description
    shown = []
    if record.epochs:
        last = record.epochs[-1]
        wrong = round((1 - last.accuracy) * description.test_samples)
        shown.append((f"{last.accuracy:.2%}", f"test accuracy ({wrong:,} of {description.test_samples:,} wrong)"))
        shown.append((f"{last.test_loss:.4f}", "test loss"))
        seconds = sum(epoch.train_seconds for epoch in record.epochs)
        shown.append((duration(seconds), f"training, {len(record.epochs)} of {record.setting.hp.epochs} epochs"))
        rate = sum(epoch.samples for epoch in record.epochs) / max(seconds, 1e-9)
        shown.append((f"{rate:,.0f}", "images per second"))
    else:
        shown.append(("-", "test accuracy, after the first epoch"))
    if run:
        ranks = f"{run.world_size} rank" + "s" * (run.world_size != 1)
        shown.append((ranks, f"{run.backend}, {run.device}, {run.precision}"))
    if record.finished:
        shown.append((duration(record.finished.total_seconds), "in all"))
    return [{"value": value, "label": label} for value, label in shown]


def progress_curves(record: Record) -> List[Curves]:
    """Loss, accuracy and learning rate over epochs."""
    at, steps, epochs = record.position, record.steps, record.epochs
    test_loss = [(epoch.epoch + 1.0, epoch.test_loss) for epoch in epochs]
    accuracy = [(epoch.epoch + 1.0, epoch.accuracy) for epoch in epochs]
    marks = [at(warning) for warning in record.warnings]
    losses = [value for _, value in test_loss] + [step.loss for step in steps]
    spread = max(losses, default=1.0) / max(min(losses, default=1.0), 1e-9)
    return [
        Curves(
            "Loss",
            {"training": [(at(step), step.loss) for step in steps], "test": test_loss},
            f"Test loss {test_loss[-1][1]:.4f} after epoch {len(epochs)}." if epochs else "",
            logarithmic=30 < spread < 1e9,
            marks=marks,
        ),
        Curves(
            "Accuracy",
            {"training": [(at(step), step.accuracy) for step in steps], "test": accuracy},
            f"Test accuracy {accuracy[-1][1]:.2%} after epoch {len(epochs)}." if epochs else "",
            percent=True,
            marks=marks,
        ),
        Curves("Learning rate", {"": [(at(step), step.learning_rate) for step in steps]}),
    ]


def speed_curves(record: Record) -> List[Curves]:
    """Throughput over epochs, and the norm of each weight's gradient."""
    at, steps = record.position, record.steps
    names = list(steps[-1].gradient_norms) if steps else []
    names = ([name for name in names if name.endswith("weight")] or names)[:MOST_LAYERS]
    norms = {
        name: [(at(step), norm) for step in steps if (norm := step.gradient_norms.get(name, 0)) > 0] for name in names
    }
    return [
        Curves(
            "Images per second, all ranks",
            {"": [(at(step), step.samples_per_second) for step in steps]},
            from_zero=True,
        ),
        Curves("Gradient norm by layer", norms, logarithmic=True),
    ]


EPOCH_HEADS = ("Epoch", "Test accuracy", "Test loss", "Training accuracy", "Training loss", "Seconds")


def epoch_lines(record: Record) -> List[List[str]]:
    """The last epochs' figures as a table."""
    return [
        [
            str(epoch.epoch + 1),
            f"{epoch.accuracy:.2%}",
            f"{epoch.test_loss:.4f}",
            f"{epoch.train_accuracy:.2%}",
            f"{epoch.train_loss:.4f}",
            f"{epoch.train_seconds + epoch.evaluate_seconds:.1f}",
        ]
        for epoch in record.epochs[-MOST_EPOCHS:]
    ]


def phase_bars(record: Record) -> List[Dict[str, Any]]:
    return _bars([(name, [f"{seconds:.2f}"], seconds) for name, seconds in record.phases()])


def rank_heads(record: Record) -> List[str]:
    return ["Rank", "Images/s", "Memory", *(["GPU memory"] if _has_gpu(record) else [])]


def rank_bars(record: Record) -> List[Dict[str, Any]]:
    """Throughput and peak memory of each rank; known when it has ended."""
    ranks = record.finished.results if record.finished else []
    has_gpu = _has_gpu(record)
    return _bars(
        [
            (
                f"{rank.rank} on {rank.host}",
                [f"{rank.samples_per_second:,.0f}", gibibytes(rank.peak_bytes)]
                + ([gibibytes(rank.peak_gpu_bytes)] if has_gpu else []),
                rank.samples_per_second,
            )
            for rank in ranks[:MOST_BARS]
        ]
    )


def _has_gpu(record: Record) -> bool:
    return record.finished is not None and any(rank.peak_gpu_bytes for rank in record.finished.results)


def data_lines(record: Record) -> List[Any]:
    """What the images are, and which ones exactly."""
    description = record.setting.description
    lines = [
        ("Name", description.name + (" (stand-in)" if record.setting.is_stand_in else "")),
        ("Training images", f"{description.train_samples:,}"),
        ("Test images", f"{description.test_samples:,}"),
        ("Image", " x ".join(map(str, description.image_shape)) + " (channels, height, width)"),
        ("Classes", len(description.classes)),
        ("Mean, standard deviation", f"{_list(description.mean)}; {_list(description.std)}"),
        *description.remarks.items(),
        ("SHA-256", description.digest),
    ]
    return _plain(lines)


def setup_tables(record: Record) -> List[Dict[str, Any]]:
    """Hyperparameters and options, what differs from the default marked; the network; the machine; the run."""
    setting, run = record.setting, record.started
    tables = [
        {"title": "Hyperparameters", "lines": _settings(setting.hp)},
        {"title": "Options", "lines": _settings(setting.options)},
        {"title": "Versions and machine", "lines": _plain(setting.surroundings.items())},
    ]
    if run:
        layers = [(name or "(the network)", f"{kind}, {count:,} parameters") for name, kind, count in run.layers]
        tables.insert(1, {"title": "Network", "lines": _plain(layers[:MOST_BARS])})
    checkpoints = (
        f"{record.checkpoints} written in {record.write_seconds:.2f} s, training waited {record.stall_seconds:.2f} s"
    )
    resumed = bool(run and (run.first_epoch or run.first_step))
    lines = [
        ("Run", setting.name),
        ("Training", setting.tracking_id),
        ("Retries before this attempt", setting.attempt),
        ("Resumed", "yes" if resumed else "no"),
        ("Checkpoints", checkpoints),
    ]
    return [*tables, {"title": "This run", "lines": _plain(lines)}]


def operator_table(record: Record) -> Dict[str, Any]:
    """What rank 0's profiler left, if it was on."""
    try:
        profile = json.loads((record.setting.logs / "profile" / "operators.json").read_text())
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


def _settings(values: Settings) -> List[Any]:
    """Name, value, and the default where the value is another."""
    return [
        (name, _text(value), _text(default) if value != default else "")
        for name, default in dataclasses.asdict(type(values)()).items()  # type: ignore[call-overload]
        for value in [getattr(values, name)]
    ]


def _plain(lines: Any) -> List[Any]:
    """Name and value, and no default to differ from."""
    return [(name, value, "") for name, value in lines]


def _bars(lines: List[Any]) -> List[Dict[str, Any]]:
    """(label, values, size) with the size as a share of the largest, in percent."""
    most = max((size for _, _, size in lines), default=0) or 1
    return [{"label": label, "values": values, "share": f"{100 * size / most:.1f}"} for label, values, size in lines]


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
