"""Promotion and roll-back as Flyte tasks.

A task of your own can promote a recipe's model:

@task(**promotion_arguments())
@platform_errors(platform)  # of flyte_ddp.attempt.failures and flyte_ddp.flyte1
def promote_flowers(model_state: PythonPickledFile, settings: Settings, place: str) -> PromotionOutputs:
    return promote_model(training.subject(settings, None), model_state, place, PromotionOptions())
"""

from pathlib import Path
from typing import Any, NamedTuple

from flytekit import Secret, task
from flytekit.types.file import FlyteFile, PythonPickledFile

from flyte_ddp.attempt.datasets import check_ranks
from flyte_ddp.attempt.failures import platform_errors
from flyte_ddp.attempt.platform_training import image_subject
from flyte_ddp.attempt.pod import check_gpus
from flyte_ddp.attempt.registration import registration
from flyte_ddp.attempt.requested import training_environment
from flyte_ddp.engine.job import Subject
from flyte_ddp.flyte1 import platform
from flyte_ddp.flyte1.inputs import choose_dataset, classifier_metadata, merge_settings
from flyte_ddp.flyte1.outputs import output_file
from flyte_ddp.flyte1.prepare import PreparedDataset
from flyte_ddp.flyte1.resources import small_resources, training_resources, training_sizes
from flyte_ddp.promote.job import PromotionOptions
from flyte_ddp.promote.place import Place
from flyte_ddp.promote.promotion import PromotionSummary, promote, roll_back_or_show, writable_place
from flyte_ddp.recipes.hyperparameters import Hyperparameters
from flyte_ddp.report.mlflow_run import ADDRESS
from flyte_ddp.settings import RunOptions


class PromotionTarget(NamedTuple):
    """The name of the dataset, the place to promote to, and the hyperparameters of the candidate."""

    dataset: str
    place: str
    hp: Hyperparameters


class PromotionOutputs(NamedTuple):
    """The outputs of a promotion.

    Attributes:
        promoted: whether the candidate is now the promoted model.
        model_state: the promoted weights, either the candidate's or still the previous ones.
        summary: the figures.
        report: an HTML page in a single file.
    """

    promoted: bool
    model_state: PythonPickledFile
    summary: PromotionSummary
    report: FlyteFile["html"]  # noqa: F821


class RollBackOutputs(NamedTuple):
    """The version that is promoted now, empty if none, and a page with the history."""

    version: str
    report: FlyteFile["html"]  # noqa: F821


def promotion_arguments() -> dict[str, Any]:
    """Return the arguments of a @task that promotes: as for training, but with at most one GPU, and never cached."""
    gpus = min(1, registration().training_gpus)
    return {
        **training_resources(),
        **training_sizes(gpus),
        "environment": training_environment(gpus),
        "secret_requests": mlflow_secret(),
        "retries": 2,
        "enable_deck": True,
        "deck_fields": (),
    }


def mlflow_secret() -> list[Secret] | None:
    """Return the secret with the address of the registry's server, if the address is a secret."""
    asked = training_resources()["secret_requests"] or []
    return [secret for secret in asked if secret.env_var == ADDRESS] or None


@task(**small_resources())
@platform_errors(platform)
def check_promotion(
    place: str, model_state: PythonPickledFile | None, hp: Hyperparameters, options: RunOptions
) -> PromotionTarget:
    """Check the inputs of a promotion, and take missing settings from the metadata of the weights; a Flyte task.

    This task runs first, so that a wrong input is found before a training. It downloads the weights. A new place gets
    an empty current.json. A local run also deletes a damaged copy of the dataset, and cache entries whose files are
    gone, and prepares mnist if nothing names a dataset.

    Args:
        place: where to promote: a URL. A local run also takes a folder, and has a default for "".
        model_state: the candidate's weights; None if the candidate is yet to be trained.
        hp: the settings. Those that have their default are taken from the weights' metadata.
        options: the options of the training. They are checked only if model_state is None.

    Returns:
        The name of the dataset, the root of the place, and the complete settings.

    Raises:
        InputError: an input is wrong: the place cannot be read, or written to if it is new, or the weights are not
            those of a built-in classifier on a built-in dataset.
        ReportedError: the place's current.json is damaged. If the storage fails, it is a RecoverableError. On a
            cluster, the errors are raised as the platform's.
    """
    known = classifier_metadata(model_state)
    target = writable_place(platform, place).root
    if model_state is None:
        check_ranks(platform, hp, options)
    dataset = choose_dataset(known, hp.dataset, "promote it in a task of your own, see flyte_ddp.promote.task")
    return PromotionTarget(dataset, target, merge_settings(known, hp))


@task(**promotion_arguments())
@platform_errors(platform)
def promote_images(
    model_state: PythonPickledFile, data: PreparedDataset, hp: Hyperparameters, place: str, options: PromotionOptions
) -> PromotionOutputs:
    """Promote the weights of hp.model, if they are better than those promoted at the place."""
    check_gpus()
    subject = image_subject(hp, Path(data.download()))
    return promote_model(subject, model_state, place, options)


def promote_model(
    subject: Subject, model_state: PythonPickledFile, place: str, options: PromotionOptions
) -> PromotionOutputs:
    """Promote a training's weights if they are better on its test split than those promoted at the place.

    A task calls this function. It downloads the weights, measures both models, writes a report and prints the outcome.
    The first model at a place is always promoted. On a cluster, the errors below are raised as the platform's own.

    Args:
        subject: the training of the candidate.
        model_state: the candidate's weights.
        place: a URL or an absolute path.
        options: the measure, the margin and further options of the promotion.

    Returns:
        Whether the candidate was promoted, the weights that are promoted now, the figures and a report.

    Raises:
        InputError: the place or the measure cannot be used, the candidate's measure or loss is not finite, or the
            promoted model has another recipe, or is for images of another kind.
        ReportedError: what is promoted at the place is damaged. If the storage fails, it is a RecoverableError.
        RankError: the process that measures has failed.
    """
    promotion = promote(platform, subject, Path(model_state.download()), Place(platform, place), options)
    model = output_file(promotion.model, PythonPickledFile)
    return PromotionOutputs(promotion.summary.promoted, model, promotion.summary, output_file(promotion.report))


@task(enable_deck=True, deck_fields=(), secret_requests=mlflow_secret(), **small_resources())
def roll_back(place: str, name: str) -> RollBackOutputs:
    """Promote an earlier version again. With an empty name, only show the history and the versions."""
    version, report = roll_back_or_show(platform, place, name)
    return RollBackOutputs(version, output_file(report))
