"""What an autoencoder's training prints, and its page."""

from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from flyte_ddp.autoencoder.job import AutoencoderJob, AutoencoderResult
from flyte_ddp.data import prepared
from flyte_ddp.data.description import DatasetDescription
from flyte_ddp.events import EpochLosses, RunStarted
from flyte_ddp.report.article import Drawing, Section, article
from flyte_ddp.report.console import Remarks, say
from flyte_ddp.report.figures import Curves, cloud, draw, picture

MOST_POINTS = 2000  # of the cloud: the page stays below a megabyte
VIEWS = (30, 120)  # degrees around the vertical


class AutoencoderConsole(Remarks):
    """Prints a line at the start and per epoch."""

    def on_run_started(self, event: RunStarted) -> None:
        say(
            f"{event.dataset}: {event.world_size} ranks ({event.backend}, {event.device}, {event.precision}) under "
            f"Lightning, {event.steps_per_epoch} steps an epoch, ready after {event.startup_seconds:.1f} s"
        )
        if event.first_epoch:
            say(f"resuming from the checkpoint: epoch {event.first_epoch + 1}")

    def on_epoch_losses(self, event: EpochLosses) -> None:
        say(
            f"Epoch {event.epoch + 1}: training loss {event.train_loss:.4f}, "
            f"validation loss {event.validation_loss:.4f}, {event.seconds:.1f} s"
        )


def page(job: AutoencoderJob, result: AutoencoderResult, setup: dict[str, Any]) -> str:
    """The page's fragment; see article.article."""
    description = prepared.read_description(job.data)
    notice = []
    if job.hp.dataset == "auto" and description.name != "mnist":
        notice = [
            f"Stand-in data: MNIST could not be downloaded; this is {description.name}, which says nothing about MNIST."
        ]
    notice += [f"Warning: {warning.reason}" for warning in result.warnings]
    settings = {**asdict(job.hp), **asdict(job.options), **setup}
    sections = [
        Section("", notice),
        _losses(job, result),
        *_test_images(job, result, description),
        Section("Set-up", heads=("Setting", "Value"), lines=[(name, str(value)) for name, value in settings.items()]),
    ]
    subtitle = f"784-64-3-64-784 under Lightning, run {job.name}"
    return article(f"Autoencoder on {description.name}", subtitle, sections)


def _losses(job: AutoencoderJob, result: AutoencoderResult) -> Section:
    epochs = result.epochs
    by_epoch = {
        "training": [(epoch.epoch + 1, epoch.train_loss) for epoch in epochs],
        "validation": [(epoch.epoch + 1, epoch.validation_loss) for epoch in epochs],
    }
    curves = [
        Curves(
            "Loss by epoch",
            by_epoch,
            marks=[warning.epoch + warning.step / job.steps_per_epoch for warning in result.warnings],
        ),
        Curves("Loss by step (training, rank 0)", {"": result.steps}),
    ]
    return Section(
        "Losses",
        ["Mean squared error per pixel; pixels go from 0 to 1."],
        [Drawing(curve.title, draw(curve)) for curve in curves],
        caption="Epochs",
        heads=("Epoch", "Training loss", "Validation loss", "Seconds"),
        lines=[
            (f"{e.epoch + 1}", f"{e.train_loss:.5f}", f"{e.validation_loss:.5f}", f"{e.seconds:.1f}") for e in epochs
        ],
    )


def _test_images(job: AutoencoderJob, result: AutoencoderResult, about: DatasetDescription) -> list[Section]:
    """Reconstructions and codes of the test images."""
    images, labels = prepared.open_split(job.data, "test")
    with np.load(Path(job.encoded_path)) as encoded:
        codes, shown, reconstructed = encoded["codes"], encoded["shown"], encoded["reconstructed"]
    mean_image = prepared.open_split(job.data, "train")[0].mean(axis=0)
    baseline = (((images - mean_image) / 255) ** 2).mean()
    gap = np.zeros((28, 1), np.uint8)
    pictures = [
        (picture(np.hstack([images[index, 0], gap, pixels])[None]), about.classes[labels[index]])
        for index, pixels in zip(shown, reconstructed, strict=True)
    ]
    some = slice(MOST_POINTS)
    what = f"Codes of {len(codes[some]):,} test images in 3D, coloured by class"
    names = [name.partition(" - ")[0] for name in about.classes]  # MNIST's are "0 - zero" and so on
    views = {turned: cloud(codes[some], labels[some], names, turned, what) for turned in VIEWS}
    drawings = [Drawing(f"Seen from {turned}°", svg) for turned, svg in views.items()]
    return [
        Section(
            "Reconstructions",
            [
                f"Mean squared error on the {len(images):,} test images: {result.test_loss:.4f}.",
                f"Always predicting the mean training image would give {baseline:.4f}.",
                "The first test image of each class, and to its right the image reconstructed from three numbers:",
            ],
            pictures=pictures,
        ),
        Section("The three numbers", [f"{what}. The network never saw the classes."], drawings),
    ]
