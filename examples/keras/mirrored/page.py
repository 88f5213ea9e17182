"""The page of a training."""

from dataclasses import asdict

from flyte_ddp.report.article import Drawing, Section, article
from flyte_ddp.report.figures import Curves, draw
from mirrored.job import CLASSES, Result
from mirrored.settings import Hyperparameters


def page(hp: Hyperparameters, result: Result) -> tuple[str, str]:
    """Return the title and the content of the page."""
    title = f"Keras network: {result.epochs[-1].test['accuracy']:.1%} of the test samples correct"
    where = f"{result.replicas} replicas, {', '.join(result.devices)} in each of {hp.processes} processes"
    confusion = [(actual, *map(str, said)) for actual, said in zip(CLASSES, result.confusion, strict=True)]
    sections = [
        Section("", figures=[curves(result, "Accuracy", percent=True), curves(result, "Loss", percent=False)]),
        Section("Test samples", heads=("Diagnosis", *(f"predicted {name}" for name in CLASSES)), lines=confusion),
        Section("Hyperparameters", lines=[(name, str(value)) for name, value in asdict(hp).items()]),
    ]
    return title, article(title, f"scikit-learn's breast-cancer data; {hp.strategy}: {where}", sections)


def curves(result: Result, title: str, percent: bool) -> Drawing:
    measure = title.lower()
    series = {
        "training": [(epoch.epoch + 1, epoch.train[measure]) for epoch in result.epochs],
        "test": [(epoch.epoch + 1, epoch.test[measure]) for epoch in result.epochs],
    }
    remark = "Training figures are means over an epoch, with dropout."
    return Drawing(title, draw(Curves(title, series, remark, percent, from_zero=not percent)))
