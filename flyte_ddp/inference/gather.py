"""The last step of batch prediction, which joins the rows of all shards in one file, counts them, and writes a page."""

import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np
from flytekit import task
from flytekit.types.directory import FlyteDirectory
from flytekit.types.file import CSVFile, FlyteFile

from flyte_ddp.attempt.failures import platform_errors
from flyte_ddp.attempt.folders import run_folder
from flyte_ddp.data.image_files import decode
from flyte_ddp.data.prepared import prepared
from flyte_ddp.flyte1 import platform
from flyte_ddp.flyte1.outputs import output_file, output_page
from flyte_ddp.flyte1.platform import is_local
from flyte_ddp.flyte1.prepare import PreparedDataset
from flyte_ddp.flyte1.resources import preparation_resources
from flyte_ddp.inference.listing import Listing
from flyte_ddp.inference.page import Tally, predicted_article, tally
from flyte_ddp.inference.shards import InferenceOptions, read_rows, write_rows
from flyte_ddp.report.console import say_last


@dataclass(frozen=True)
class InferenceSummary:
    """The result in figures.

    Attributes:
        dataset: the dataset that the model was trained on, according to the options.
        images: number of rows.
        unreadable: image files without a prediction.
        labelled: images with a prediction whose class is known.
        accuracy: share of the labelled images that is predicted correctly, from 0 to 1; None if there are none.
    """

    dataset: str
    images: int
    unreadable: int
    labelled: int
    accuracy: float | None


class InferenceOutputs(NamedTuple):
    """The outputs of batch prediction.

    Attributes:
        predictions: a flyte_ddp.inference.shards.Row for each image.
        summary: the figures.
        report: an HTML page in a single file.
    """

    predictions: CSVFile
    summary: InferenceSummary
    report: FlyteFile["html"]  # noqa: F821


@task(enable_deck=True, deck_fields=(), **preparation_resources())
@platform_errors(platform)
def gather_shards(
    parts: list[CSVFile],
    data: PreparedDataset,
    folder: FlyteDirectory | None,
    listing: FlyteFile,
    options: InferenceOptions,
) -> InferenceOutputs:
    """Join all rows in one file, in the order of the images, and summarise them."""
    description = prepared.read_description(data.download())
    with run_folder(platform, "inference") as work:
        predictions = work / "predictions.csv"
        write_rows(predictions, read_rows(*(Path(part.download()) for part in parts)))
        totals = tally(predictions)
        source = f"folder {Path(folder.path).name}" if folder is not None else f"{description.name}, {options.split}"
        title = f"Predictions: {source}"
        images = images_of(totals, Path(data.download()), folder, Path(listing.download()), options)
        fragment = predicted_article(title, totals, images, description, options)
        report = output_page(work, title, fragment)
    summary = InferenceSummary(description.name, totals.images, totals.unreadable, totals.labelled, totals.accuracy)
    if is_local():
        say_last(f"\n{totals}\nPredictions: {predictions}\nReport:      {report.path}")
    return InferenceOutputs(output_file(predictions, CSVFile), summary, report)


def images_of(
    totals: Tally, data: Path, folder: FlyteDirectory | None, listing: Path, options: InferenceOptions
) -> list[np.ndarray]:
    """Return the least certain images (C, H, W) uint8, as the network saw them."""
    numbers = [number for number, _ in totals.least_certain]
    if folder is None:
        images, _ = prepared.open_split(data, options.split)
        return [images[number] for number in numbers]
    listed = Listing.read(listing).files
    shown = Listing([listed[number] for number in numbers])
    shape = prepared.read_description(data).image_shape
    with tempfile.TemporaryDirectory(prefix="ddp-") as copies:
        try:
            return [decode(Path(path), shape) for _, path in shown.fetch(folder, Path(copies))]
        finally:
            shown.verify(folder)  # verify() says why an image cannot be read
