"""Promotion within a task of Flyte 2.

A task of your own can promote a recipe's model:

@env.task(**promotion_arguments())
async def promote_flowers(model_state: File, settings: Settings, place: str) -> PromotionOutputs:
    with one_attempt():
        return promote_model(training.subject(settings, None), model_state, place, PromotionOptions())
"""

from dataclasses import dataclass
from typing import Any

import flyte
from flyte import artifacts
from flyte.io import Dir, File

from flyte_ddp.attempt.platform_training import image_subject
from flyte_ddp.attempt.pod import check_gpus
from flyte_ddp.engine.job import Subject
from flyte_ddp.flyte2 import platform
from flyte_ddp.flyte2.attempt import one_attempt
from flyte_ddp.flyte2.data import downloaded, output_file
from flyte_ddp.flyte2.environment import PAUSES
from flyte_ddp.promote.job import PromotionOptions
from flyte_ddp.promote.place import Place
from flyte_ddp.promote.promotion import PromotionSummary, promote, roll_back_or_show, writable_place
from flyte_ddp.recipes.hyperparameters import Hyperparameters


@dataclass(frozen=True)
class PromotionOutputs:
    """The outputs of a promotion, with the fields of flyte_ddp.promote.task.PromotionOutputs."""

    promoted: bool
    model_state: File
    summary: PromotionSummary
    report: File


@dataclass(frozen=True)
class RollBackOutputs:
    """The version that is promoted now, empty if none, and a page with the history."""

    version: str
    report: File


def promotion_arguments() -> dict[str, Any]:
    """Return the arguments of a task that promotes, which is never cached."""
    return {"retries": flyte.RetryStrategy(2, PAUSES), "report": True}


def resolve_place(place: str) -> str:
    """Return the root of a Place that can be written to, even before anything is trained. A local run has a default."""
    with one_attempt():
        return writable_place(platform, place).root


def promote_images(
    model_state: File, data: Dir, hp: Hyperparameters, place: str, options: PromotionOptions
) -> PromotionOutputs:
    """Promote the image classifier's weights if they are better on the test split than the weights promoted at a place.

    Call this function inside a task: it does the work itself, and starts no other task. It downloads the inputs,
    measures both models, writes a report and prints the outcome. The first model at a place is always promoted.

    Args:
        model_state: the candidate's weights.
        data: the prepared dataset, which has the test split.
        hp: the settings that the candidate was trained with.
        place: where models are promoted: a URL or an absolute path.
        options: the measure, the margin and further options of the promotion.

    Returns:
        Whether the candidate was promoted, the weights that are promoted now, the figures and a report.

    Raises:
        FinalError: the promotion has failed, and would again. A local run raises it for any failure.
        AttemptError: on a cluster, the promotion has failed, and Flyte retries.
    """
    with one_attempt():
        check_gpus()
        folder = downloaded(data)
        assert folder
        return promote_model(image_subject(hp, folder), model_state, place, options)


def promote_model(subject: Subject, model_state: File, place: str, options: PromotionOptions) -> PromotionOutputs:
    """Promote a training's weights if they are better on its test split than the weights promoted at a place.

    A task calls this function within one_attempt(), which raises the errors below as the platform's. The function
    downloads the weights, measures both models, writes a report and prints the outcome. The first model at a place is
    always promoted.

    Args:
        subject: the training of the candidate.
        model_state: the candidate's weights.
        place: where models are promoted: a URL or an absolute path.
        options: the measure, the margin and further options of the promotion.

    Returns:
        Whether the candidate was promoted, the weights that are promoted now, the figures and a report.

    Raises:
        InputError: the place or the measure cannot be used, the candidate's measure or loss is not finite, or the
            promoted model has another recipe, or is for images of another kind.
        DownloadError: the weights cannot be downloaded.
        ReportedError: what is promoted at the place is damaged. If the storage fails, it is a RecoverableError.
        RankError: the process that measures has failed.
    """
    model = downloaded(model_state)
    assert model
    promotion = promote(platform, subject, model, Place(platform, place), options)
    return PromotionOutputs(
        promotion.summary.promoted, output_file(promotion.model), promotion.summary, output_file(promotion.report)
    )


def make_artifact(model_state: File, summary: PromotionSummary, name: str) -> Any:
    """Return the promoted model as a version of a Flyte artifact, for a task with produces_artifacts to return.

    Nothing is sent to Flyte here. The artifact's description has the measure that decided the promotion.

    Args:
        model_state: the promoted weights.
        summary: the outcome of the promotion.
        name: the artifact's name.
    """
    measured = f"{summary.measure} {summary.candidate:g} on {summary.samples:,} test samples"
    metadata = artifacts.Metadata(
        name=name, version=summary.version, description=measured, attrs={"place": summary.place}, kind="model"
    )
    return artifacts.new(model_state, metadata)


def roll_back_to(place: str, name: str) -> RollBackOutputs:
    """Promote an earlier version again. With an empty name, only show the history and the versions."""
    with one_attempt():
        version, report = roll_back_or_show(platform, place, name)
        return RollBackOutputs(version, output_file(report))
