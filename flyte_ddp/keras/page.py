"""The page of a Keras training under tf.distribute."""

import dataclasses
from importlib.metadata import version
from typing import List, Tuple

from flyte_ddp.keras.job import CLASSES, MirroredHyperparameters, MirroredResult
from flyte_ddp.report.article import Drawing, Section, article
from flyte_ddp.report.figures import Curves, draw
from flyte_ddp.report.surroundings import surroundings


def mirrored_page(hp: MirroredHyperparameters, result: MirroredResult) -> Tuple[str, str]:
    """The title of a training's page, and its content."""
    last = result.epochs[-1]
    strategy = "MultiWorkerMirroredStrategy" if hp.strategy == "multi_worker" else "MirroredStrategy"
    title = f"Keras network: {last.test['accuracy']:.1%} of the test samples correct"
    where = ", ".join(result.devices) + (f" in each of {hp.processes} workers" if hp.processes > 1 else "")
    fragment = article(
        title,
        f"scikit-learn's breast-cancer data, {result.train_samples} samples for training and {result.test_samples} "
        f"for testing; {strategy}, {result.replicas} replicas: {where}",
        [
            Section(
                "",
                figures=[
                    curves(result, "Accuracy", "accuracy", percent=True),
                    curves(result, "Loss", "loss", percent=False),
                ],
            ),
            Section(
                "Test samples",
                caption="By diagnosis",
                heads=("Diagnosis", *(f"predicted {name}" for name in CLASSES)),
                lines=[(actual, *map(str, said)) for actual, said in zip(CLASSES, result.confusion, strict=True)],
            ),
            Section(
                "Network",
                caption="Layers",
                heads=("Layer", "Type", "Parameters"),
                lines=[(layer, kind, f"{count:,}") for layer, kind, count in result.layers],
            ),
            Section("Run", caption="Hyperparameters", lines=[(k, str(v)) for k, v in dataclasses.asdict(hp).items()]),
            Section("Set-up", caption="Versions and hardware", lines=set_up()),
        ],
    )
    return title, fragment


def curves(result: MirroredResult, title: str, measure: str, percent: bool) -> Drawing:
    """A measure of the training and test samples over the epochs."""
    series = {
        "training": [(epoch.epoch + 1, epoch.train[measure]) for epoch in result.epochs],
        "test": [(epoch.epoch + 1, epoch.test[measure]) for epoch in result.epochs],
    }
    remark = "Training figures are means over an epoch, with dropout."
    return Drawing(title, draw(Curves(title, series, remark, percent, from_zero=not percent)))


def set_up() -> List[Tuple[str, str]]:
    unused = ("torch", "torchvision", "wandb")
    return [
        ("tensorflow", version("tensorflow")),
        *((name, value) for name, value in surroundings().items() if name not in unused),
    ]
