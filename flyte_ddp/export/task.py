"""Verified export, as Flyte tasks for the built-in classifiers and as a function for a task of your own recipe.

@task(**training.arguments(cache=False))
def export_model(model_state: FlyteFile, settings: Settings, reported: Dict[str, float]) -> ExportOutputs:
    return export_recipe(training, model_state, settings, reported=reported)
"""

import json
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

from flytekit import task
from flytekit.types.directory import FlyteDirectory
from flytekit.types.file import FlyteFile, PythonPickledFile

from flyte_ddp.attempt.failures import platform_errors
from flyte_ddp.attempt.folders import run_folder
from flyte_ddp.attempt.platform_training import image_subject
from flyte_ddp.data.description import StoredData
from flyte_ddp.data.sources.image_settings import ImageSettings
from flyte_ddp.engine.job import Subject, make_job
from flyte_ddp.errors import InputError
from flyte_ddp.export.settings import ClassifierExport, ExportJob, ExportOptions, FolderExport, check_formats
from flyte_ddp.export.verified import export
from flyte_ddp.flyte1 import platform
from flyte_ddp.flyte1.data import downloaded
from flyte_ddp.flyte1.index_images import attach
from flyte_ddp.flyte1.inputs import check_dataset, choose_dataset, classifier_metadata
from flyte_ddp.flyte1.outputs import output_folder, output_page
from flyte_ddp.flyte1.platform import is_local
from flyte_ddp.flyte1.prepare import PreparedDataset
from flyte_ddp.flyte1.recipe import RecipeTraining
from flyte_ddp.flyte1.resources import preparation_resources, small_resources
from flyte_ddp.flyte1.train import Data
from flyte_ddp.model_files.model_metadata import MEASURED_ON, ModelMetadata, read_metadata
from flyte_ddp.recipes.hyperparameters import FolderHyperparameters, Hyperparameters
from flyte_ddp.report.console import say_last
from flyte_ddp.settings import TrainingSettings
from flyte_ddp.whole_files import temporary_beside


@dataclass(frozen=True)
class ExportSummary:
    """The figures of an export.

    Attributes:
        recipe: the recipe that trained the model.
        headline: the name of the main measure.
        measures: measures of the weights, on the test split.
        exported: the main measure of each format.
        classes: the share of each class's test samples that is predicted correctly; empty if there are no classes.
        parameters: the number of parameters.
    """

    recipe: str
    headline: str
    measures: dict[str, float]
    exported: dict[str, float]
    classes: dict[str, float]
    parameters: int


class ExportOutputs(NamedTuple):
    """The outputs of an export.

    Attributes:
        model: a folder with the files, model.json and the model card.
        summary: the figures.
        report: the model card as a page.
    """

    model: FlyteDirectory
    summary: ExportSummary
    report: FlyteFile["html"]  # noqa: F821


@task(**small_resources())
@platform_errors(platform)
def check_export(model_state: PythonPickledFile | None, options: ClassifierExport) -> str:
    """Check the inputs of an export of a built-in classifier, and return the name of its dataset; a Flyte task.

    The task downloads weights that are in a storage. In a local run, it also deletes the prepared dataset if that is
    damaged, and entries of Flyte's cache whose files are gone.

    Args:
        model_state: the weights; None if the same workflow trains them.
        options: the options of the export.

    Returns:
        options.dataset, unless that is "auto". For "auto", the dataset in the weights' metadata or, without metadata,
        "mnist". A local run prepares mnist then; if the download fails, the name is "digits".

    Raises:
        InputError: A format's library is missing. Or the weights' file does not exist in a local run. Or the weights
            are not those of a built-in classifier on a built-in dataset, or were trained on another dataset than
            options.dataset.
    """
    check_formats(options)
    known = classifier_metadata(model_state)
    dataset = choose_dataset(known, options.dataset, "run export_folder_wf with that folder")
    check_dataset(known, options.dataset)
    return dataset


@task(**small_resources())
@platform_errors(platform)
def check_folder_export(
    model_state: PythonPickledFile | None, images: ImageSettings, options: FolderExport
) -> ImageSettings:
    """Check the inputs of an export of an image folder's classifier, and return `images` unchanged; a Flyte task.

    The task reads no image. It compares the size and the channels in `images` with those in the weights' metadata.
    Without weights or metadata, it compares nothing.

    Args:
        model_state: the weights; None if the same workflow trains them.
        images: the settings of the images.
        options: the options of the export.

    Raises:
        InputError: A format's library or the file of weights is missing, the weights are not those of a built-in
            classifier, or they were trained on images of another size or number of channels.
    """
    check_formats(options)
    known = classifier_metadata(model_state)
    if known and tuple(known.facts["image_shape"]) != images.shape:
        channels, size, _ = known.facts["image_shape"]
        wanted = json.dumps({"image_size": size, "channels": "rgb" if channels == 3 else "grayscale"})
        raise InputError(
            f"images must be like those that model_state was trained on, {size} pixels and {channels} channels, got "
            f"{images.image_size} and {images.shape[0]}: set --images '{wanted}'"
        )
    return images


@task(enable_deck=True, deck_fields=(), retries=2, **preparation_resources())
@platform_errors(platform)
def export_classifier(
    model_state: PythonPickledFile, data: PreparedDataset, options: ClassifierExport
) -> ExportOutputs:
    """Export a built-in classifier, in all formats or none. Never cached: files are verified where they are made."""
    hp = Hyperparameters(dataset=options.dataset, model=options.network)
    return _classifier(model_state, Path(data.download()), hp, options)


@task(enable_deck=True, deck_fields=(), retries=2, **preparation_resources())
@platform_errors(platform)
def export_folder_classifier(
    model_state: PythonPickledFile,
    index: PreparedDataset,
    folder: FlyteDirectory,
    options: FolderExport,
) -> ExportOutputs:
    """Export a classifier of a folder of images in each of options.formats, and verify each file; a Flyte task.

    The task is never cached. If one format fails, there are no outputs. The network is options.model or, if that is
    "auto", the one in the weights' metadata; without metadata it is "mnist_cnn".

    Args:
        model_state: the weights.
        index: the index of the images, from index_images.
        folder: the images.
        options: how to export.

    Returns:
        The folder of files, the figures, and the model card as a page.

    Raises:
        InputError: The weights do not fit the network, their loss is not finite, their measures are not those in
            options.reported or in their metadata, or a format does not support the network.
        ReportedError: A file cannot be used, or gives other measures than the weights. Or an image has changed since
            it was indexed. On a cluster, the platform's error is raised in place of these errors.
    """
    hp = FolderHyperparameters(model=options.network)
    return _classifier(model_state, Path(attach(index, folder).download()), hp, options)


def _classifier(
    model_state: PythonPickledFile, data: Path, hp: Hyperparameters, options: FolderExport
) -> ExportOutputs:
    weights = Path(model_state.download())
    known = read_metadata(weights)
    if known and options.model == "auto":
        hp = replace(hp, model=known.facts["network"])
    settings = {"model": hp.model, "dataset": hp.dataset}
    return _export_verified(image_subject(hp, data), weights, settings, options.reported, known, options)


@platform_errors(platform)
def export_recipe(
    training: RecipeTraining,
    model_state: FlyteFile,
    settings: TrainingSettings,
    data: Data | StoredData = None,
    reported: dict[str, float] | None = None,
    options: ExportOptions = ExportOptions(),  # noqa: B008 frozen
    init: FlyteDirectory | None = None,
) -> ExportOutputs:
    """Export a recipe's trained network to a file in each of options.formats, and verify each file.

    Call this function within a task of your own. It downloads its inputs, prints each file's main measure, and shows
    the model card as the task's Deck. If one format fails, there are no outputs. On a cluster, the platform's error is
    raised in place of the errors below.

    Args:
        training: the recipe's training.
        model_state: the weights.
        settings: the settings of the training, from which the recipe builds the network. The model card and the files'
            metadata show the settings in the weights' metadata instead, if the same recipe wrote the weights.
        data: the data of the training.
        reported: the measures in the training's summary, which the weights must give again. Without it,
            options.reported counts. If the same recipe wrote the weights, their metadata add the measures that are
            missing.
        options: how to export.
        init: the folder that the training was given as init; None if there was none.

    Returns:
        A folder with the files and the model card, the figures, and the model card as a page.

    Raises:
        InputError: A format's library is missing, the weights' loss is not finite, their measures are not the reported
            ones, or a format does not support the network.
        ReportedError: A file cannot be used, or gives other measures than the weights. Or this pod's code is not what
            was registered. Or a process that measures has failed, or was silent for options.timeout_seconds
            (RankError).
    """
    check_formats(options)
    subject = training.subject(settings, data if isinstance(data, StoredData) else downloaded(data), downloaded(init))
    weights = Path(model_state.download())
    known = read_metadata(weights)
    return _export_verified(subject, weights, asdict(settings), reported or options.reported, known, options)


def _export_verified(
    subject: Subject,
    weights: Path,
    settings: dict[str, Any],
    reported: dict[str, float],
    known: ModelMetadata | None,
    options: ExportOptions,
) -> ExportOutputs:
    """Export the weights to a folder `model` among this run's outputs, and verify each file.

    The folder `model` appears whole or not at all. The model card is also shown as the task's Deck. At its end, a local
    run prints the paths of `model` and of the card.

    Args:
        subject: the recipe, with its data and options.
        weights: the file of weights.
        settings: the training's settings, for the card and the files. If the same recipe wrote the weights, the
            settings in `known` replace all of these.
        reported: the training's measures, with which the weights' measures must agree. If the same recipe wrote the
            weights, and measured them on the test split, `known` adds the measures that are missing.
        known: the weights' metadata; None if the file has none.
        options: how to export.

    Returns:
        The folder `model`, the figures, and the model card as a page.

    Raises:
        InputError: The loss is not finite, the measures do not agree, a format does not support the network, or the
            folder for outputs cannot be written to.
        ReportedError: A file cannot be used, or gives other measures than the weights.
    """
    if known and known.recipe == subject.recipe:
        settings = known.settings
        reported = {**known.tested, **reported}
    job = make_job(subject, model_path=weights)
    training = {name: value for name, value in known.training.items() if name != MEASURED_ON} if known else {}
    with run_folder(platform, f"{subject.dataset}-export") as folder:
        beside = temporary_beside(folder / "model")
        done = export(ExportJob(job, str(beside), options, settings, reported, training))
        beside.rename(folder / "model")
        report = output_page(folder, done.card.title, done.card.fragment)
    metadata = done.written.metadata
    if is_local():
        say_last(f"\nExported: {folder / 'model'}\nReport:   {report.path}")
    summary = ExportSummary(
        recipe=metadata.recipe,
        headline=metadata.headline,
        measures=done.written.measured.measures,
        exported={name: measured.measures[metadata.headline] for name, measured in done.formats.items()},
        classes=done.written.classes,
        parameters=done.written.parameters,
    )
    return ExportOutputs(output_folder(folder / "model"), summary, report)
