"""Promotion within a task of Flyte 2. What compares and stores models is shared with Flyte 1, by flytekit's client."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import flyte
from flyte.io import Dir, File

from flyte_ddp.attempt.folders import runs_dir
from flyte_ddp.attempt.pod import check_gpus
from flyte_ddp.attempt.training import image_subject
from flyte_ddp.errors import InputError
from flyte_ddp.flyte2 import platform
from flyte_ddp.flyte2.attempt import one_attempt
from flyte_ddp.flyte2.data import downloaded, output_file
from flyte_ddp.flyte2.environment import PAUSES
from flyte_ddp.launch.environment import visible_gpus
from flyte_ddp.promote.job import PromotionOptions
from flyte_ddp.promote.place import Place
from flyte_ddp.promote.promotion import PromotionSummary, promote
from flyte_ddp.recipes.hyperparameters import Hyperparameters


@dataclass(frozen=True)
class PromotionOutputs:
    """The outputs of a promotion.

    Attributes:
        promoted: whether the candidate is now the promoted model.
        model_state: the promoted weights, either the candidate's or still the previous ones.
        summary: the figures.
        report: an HTML page in a single file.
    """

    promoted: bool
    model_state: File
    summary: PromotionSummary
    report: File


def promotion_arguments() -> dict[str, Any]:
    """Arguments of a task that promotes; it is never cached."""
    return {"retries": flyte.RetryStrategy(2, PAUSES)}


def resolve_place(place: str) -> str:
    """The root of a Place that can be written to, also before anything is trained; a local run has a default."""
    with one_attempt():
        if not place and not platform.is_local():
            raise InputError(
                "place must be a URL of the cluster's storage, such as s3://bucket/mnist, got none: set it"
            )
        local = Path(place or runs_dir().with_name("promoted")).expanduser().absolute()
        models = Place(place if "://" in place else str(local))
        models.read()
        models.begin()
        return models.root


def promote_images(
    model_state: File, data: Dir, hp: Hyperparameters, place: str, options: PromotionOptions
) -> PromotionOutputs:
    """Promotes the weights of hp.model, if they are better than those promoted at the place."""
    with one_attempt():
        check_gpus(visible_gpus())
        folder, model = downloaded(data), downloaded(model_state)
        assert folder
        assert model
        found = promote(image_subject(hp, folder), model, Place(place), options, platform)
        promoted, report = (output_file(Path(file.path)) for file in (found.model_state, found.report))
        return PromotionOutputs(found.promoted, promoted, found.summary, report)
