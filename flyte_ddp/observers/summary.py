"""The last words of a run: what came out, where the time went, where things lie, and what to try next."""

from pathlib import Path

from flyte_ddp.observers.console import say
from flyte_ddp.observers.record import Record, Setting

MOST_EPOCHS = 10


def say_summary(record: Record, model: Path, report: Path, show_paths: bool) -> None:
    """Of a run that has finished. show_paths: whether its files stay where they are, as those of a local run do."""
    setting, epochs = record.setting, record.epochs
    description = setting.description
    accuracies = [f"{epoch.accuracy:.2%}" for epoch in epochs]
    if len(epochs) > MOST_EPOCHS:
        accuracies = [accuracies[0], "…", *accuracies[-MOST_EPOCHS + 1 :]]
    images = f"{description.train_samples:,} training and {description.test_samples:,} test images"
    lines = [
        ("Data", f"{description.name}, {images}{' (standing in for MNIST)' if setting.is_stand_in else ''}"),
        ("Accuracy", f"{', '.join(accuracies)} on the test images, epoch by epoch"),
        ("Seconds", ", ".join(f"{name.lower()} {seconds:.1f}" for name, seconds in record.phases())),
    ]
    lines += [("Warning", warning.reason) for warning in record.warnings]
    if show_paths:
        lines += [("Model", str(model)), ("Report", str(report)), ("Next", next_step(setting, report))]
    say("\n" + "\n".join(f"{label + ':':<10}{text}" for label, text in lines))


def next_step(setting: Setting, report: Path) -> str:
    """A command that suits this run."""
    if setting.options.tracking == "tensorboard":
        return f"tensorboard --logdir {setting.logs}"
    if setting.options.tracking == "offline":
        return f"wandb sync {setting.logs}/wandb/offline-run-*"
    return f"python -m webbrowser {report.as_uri()}"
