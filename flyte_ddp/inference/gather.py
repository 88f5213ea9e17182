"""The last step of batch prediction, which joins the rows of all shards in one file, counts them, and writes a page."""

import json
import tempfile
from collections.abc import Sequence
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
from flyte_ddp.errors import InputError, ReportedError
from flyte_ddp.flyte1 import platform
from flyte_ddp.flyte1.data import fetch, list_files
from flyte_ddp.flyte1.outputs import output_file, output_page
from flyte_ddp.flyte1.platform import is_local
from flyte_ddp.flyte1.prepare import PreparedDataset
from flyte_ddp.flyte1.resources import preparation_resources
from flyte_ddp.inference.page import Tally, render_results, tally
from flyte_ddp.inference.shards import InferenceOptions, Shard, read_rows, write_rows
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


@task(enable_deck=True, deck_fields=(), retries=2, **preparation_resources())
@platform_errors(platform)
def gather_shards(
    parts: list[CSVFile],
    data: PreparedDataset,
    folder: FlyteDirectory | None,
    listing: FlyteFile,
    options: InferenceOptions,
) -> InferenceOutputs:
    """Join the rows of all shards in one CSV file, and return the file, a summary, and a page; a Flyte task.

    The page shows the least certain images, and is also the task's Deck. A local run prints the result and the paths of
    its files.

    Args:
        parts: the CSV files of the shards, in order.
        data: the prepared dataset that the model was trained on.
        folder: the images; None if they are those of options.split of `data`.
        listing: the list of the folder's files.
        options: the options of the prediction.

    Raises:
        ReportedError: An image file that the page shows has changed since it was listed. On a cluster, this error is
            raised as the platform's.
    """
    description = prepared.read_description(data.download())
    with run_folder(platform, "inference") as work:
        predictions = work / "predictions.csv"
        write_rows(predictions, read_rows(*(Path(part.download()) for part in parts)))
        totals = tally(predictions)
        source = f"folder {Path(folder.path).name}" if folder is not None else f"{description.name}, {options.split}"
        title = f"Predictions: {source}"
        images = load_least_certain(totals, Path(data.download()), folder, Path(listing.download()), options)
        fragment = render_results(title, totals, images, description, options)
        report = output_page(work, title, fragment)
    summary = InferenceSummary(description.name, totals.images, totals.unreadable, totals.labelled, totals.accuracy)
    if is_local():
        say_last(f"\n{totals}\nPredictions: {predictions}\nReport:      {report.path}")
    return InferenceOutputs(output_file(predictions, CSVFile), summary, report)


def load_least_certain(
    totals: Tally, data: Path, folder: FlyteDirectory | None, listing: Path, options: InferenceOptions
) -> list[np.ndarray]:
    """Return the images of totals.least_certain in that order, the least certain first, as the network saw them.

    Each image is (C, H, W) uint8, in the shape of the dataset's images.

    Args:
        totals: the counts of all predictions, with the rows of the least certain ones.
        data: the folder of the prepared dataset that the model was trained on.
        folder: the folder of the predicted images, from which only the needed files are read. None if the images are
            those of options.split of `data`.
        listing: the JSON file in which plan_shards() has listed the folder's files; not read if `folder` is None.
        options: the options of the prediction, of which only `split` is used.

    Raises:
        ReportedError: A needed file has changed, or is gone, since it was listed. DataError, which derives from this
            error, means that the prepared dataset is damaged.
    """
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


# --- listing ---


@dataclass(frozen=True)
class Listing:
    """Names of files below a folder, with details that change when the files do; empty if there is no folder."""

    files: Sequence[tuple[str, str]]

    @classmethod
    def of(cls, folder: FlyteDirectory | None) -> "Listing":
        """List the files below a folder, except hidden ones.

        Args:
            folder: the folder of images. If it is None, the listing is empty.

        Raises:
            InputError: The folder has no files, or is a file.
            DownloadError: The storage fails.
        """
        files = [] if folder is None else [*list_files(folder).items()]
        if folder is not None and not files:
            raise InputError(f"folder must contain image files, got {folder.path} without any: choose another folder")
        return cls(files)

    @classmethod
    def read(cls, path: Path) -> "Listing":
        return cls([(name, details) for name, details in json.loads(path.read_bytes())])

    def write(self, path: Path) -> Path:
        path.write_text(json.dumps(self.files), encoding="utf-8")
        return path

    def part(self, shard: Shard) -> "Listing":
        return Listing(self.files[shard.first : shard.last])

    def fetch(self, folder: FlyteDirectory | None, into: Path) -> list[tuple[str, str]]:
        """Return the name of each listed file, with the file's path on this machine; [] if `folder` is None.

        Args:
            folder: the folder of the files, or None.
            into: an existing folder. Files in a storage are downloaded to it; files on this machine stay where they
                are.

        Raises:
            ReportedError: a listed file is gone from the storage. DownloadError, which derives from this error, means
                that the storage fails. (A file that is gone from this machine raises nothing.)
        """
        if folder is None:
            return []
        try:
            return fetch(folder, [name for name, _ in self.files], into)
        except FileNotFoundError:
            self.verify(folder)
            raise

    def verify(self, folder: FlyteDirectory | None) -> None:
        """Check that the listed files are still as they were when they were listed.

        The whole folder is listed again. Sizes, times and other metadata are compared, not the content.

        Args:
            folder: the folder of the files; None if the listing is empty.

        Raises:
            ReportedError: a file has changed, or is gone.
        """
        now = {} if folder is None else list_files(folder)
        changed = [name for name, details in self.files if now.get(name) != details]
        if changed:
            raise ReportedError(
                f"{len(changed):,} image files have changed while they were predicted, such as {changed[0]}: run "
                "again, and leave the folder as it is until the run has ended"
            )
