"""The probe of a recipe's evaluation before training: what is made of its outputs, and what they depend on."""

import copy
import json
from typing import Any

import torch
from torch import Tensor

from flyte_ddp.engine.batches.batches import Batch, EvaluationBatches
from flyte_ddp.engine.batches.lengths import get_lengths
from flyte_ddp.engine.batches.splits import Split
from flyte_ddp.engine.checks.trials import Trials, as_input_error, choose_tolerance, is_close
from flyte_ddp.engine.code_location import code_location
from flyte_ddp.engine.measures import check_rows, compute_pairs, mismatched
from flyte_ddp.errors import InputError
from flyte_ddp.fields import plain


def try_evaluation(evaluation: Trials, split: Split, is_mixed: bool) -> None:
    """Raise InputError if an evaluation or the training's end would fail, or depend on how samples are divided.

    Args:
        evaluation: the trials of the evaluation. Call this right after the trial of all samples.
        split: the test split.
        is_mixed: whether evaluations pair outputs with other samples, to estimate the loss of guessing.
    """
    _refuse_moving_buffers(evaluation)
    _try_results(evaluation, is_mixed)
    _refuse_uneven_rows(evaluation, split, is_mixed)
    _refuse_coupled_predictions(evaluation)


def _refuse_moving_buffers(evaluation: Trials) -> None:
    """Raise InputError if, with virtual ranks, the last trial has changed a buffer that is in the state_dict.

    Without virtual ranks nothing is refused. With them, the number of ranks decides how often an evaluation would
    change the buffer, so the resulting bits would depend on it.
    """
    recipe, network = evaluation.recipe, evaluation.network
    changed = network.changed_buffers() if recipe.settings.virtual_ranks else ()
    for name in network.model.state_dict().keys() & changed:
        raise InputError(
            f"{code_location(recipe, 'forward')}: with virtual_ranks an evaluation must leave buffers as they are, "
            f"and it changes {name}: change it only if self.training, or set virtual_ranks to 0"
        )


@torch.no_grad()
def _try_results(evaluation: Trials, is_mixed: bool) -> None:
    """Raise InputError if a method of the recipe returns what would fail later, after an epoch or at the end.

    - facts() must return a dict that JSON can hold, with strings for keys.
    - measure() must work for outputs paired with other samples' targets, if is_mixed is set.
    - predictions() must return None, or a tensor with a row for each sample and a dtype that NumPy has.
    - pictures() must return pairs of a caption and an image (C, H, W) of 1 or 3 channels.
    """
    recipe = evaluation.recipe
    tree = evaluation.tree
    returned = evaluation.whole.stages
    outputs = returned["forward"]
    facts: Any = recipe.facts()
    if not isinstance(facts, dict):  # metadata with other facts could not be read
        raise InputError(f"{code_location(recipe, 'facts')} must return a dict, got {type(facts).__name__}")
    try:
        json.dumps(plain(copy.deepcopy(facts)), default=str)  # as the metadata of the weights are written
    except (TypeError, ValueError, RuntimeError) as error:
        raise InputError(
            f"{code_location(recipe, 'facts')} must return what JSON can hold, with strings for keys: {error}"
        ) from None
    if is_mixed:
        what = f"{code_location(recipe, 'measure')}: fails for outputs paired with other samples, as guesses would be"
        with as_input_error(what, "define constant_loss(), the loss of guessing"):
            compute_pairs(recipe, mismatched(outputs), Batch(tree, recipe.share))
    predictions = returned["predictions"]
    count = evaluation.size
    if predictions is not None:
        check_rows(recipe, predictions, count)
        where = code_location(recipe, "predictions")
        with as_input_error(f"{where}: NumPy cannot hold what it returns", "call float() on it"):
            predictions.cpu().numpy()
    where = code_location(recipe, "pictures")
    with as_input_error(f"{where} fails, or returns no pairs of a caption and an image", "return () for none"):
        pictures = [(str(caption), picture) for caption, picture in recipe.pictures(outputs, tree)]
    for _, picture in pictures:
        if not isinstance(picture, Tensor) or picture.ndim != 3 or picture.shape[0] not in (1, 3):
            shape = f"shape {_shape(picture)}" if isinstance(picture, Tensor) else _shape(picture)
            raise InputError(f"{where} must return images, tensors (C, H, W) of 1 or 3 channels, got {shape}")


def _shape(value: Any) -> str:
    return str(tuple(value.shape)) if isinstance(value, Tensor) else type(value).__name__


def _refuse_uneven_rows(evaluation: Trials, split: Split, is_mixed: bool) -> None:
    """Raise InputError if the shape of a row of predictions() depends on how far samples are padded.

    The longest sample of a batch decides how far the batch is padded. The shortest and the longest of these samples are
    tried, each repeated to fill a batch. Nothing is tried if the recipe has no lengths or no predictions.
    """
    recipe = evaluation.recipe
    lengths = get_lengths(split)
    size = evaluation.recipe.settings.test_batch_size
    if not lengths or evaluation.whole.stages["predictions"] is None:
        return
    samples = EvaluationBatches(split, size, rank=0, world_size=1, mixed=is_mixed).order.at(torch.arange(len(split)))
    longest = torch.stack([batch[lengths.each[batch].argmax()] for batch in samples.split(size)])
    rows = []
    for index in (longest[lengths.each[longest].argmin()], longest[lengths.each[longest].argmax()]):
        trial = Trials(recipe, evaluation.network, split, index.expand(evaluation.size), False)()
        rows.append(trial.stages["predictions"])
    check_rows(recipe, rows[0], evaluation.size, rows[1])


def _refuse_coupled_predictions(evaluation: Trials) -> None:
    """Raise InputError if a sample's predictions depend on the other samples of its batch.

    The batch is predicted whole and in two parts, and the results are compared. Nothing is compared if there are no
    predictions or only one sample, if the evaluation draws random numbers, or if rows of the parts have another shape,
    as when each part is padded to its own longest sample.
    """
    predictions = evaluation.whole.stages["predictions"]
    size = evaluation.size
    if predictions is None or evaluation.whole.has_drawn or size == 1:
        return
    # The parts are no halves, because two halves might both have the mean of the whole
    cut = max(1, 3 * size // 8)
    parts = [evaluation(*ends).stages["predictions"] for ends in ((0, cut), (cut, size))]
    if [part.shape for part in parts] != [(count, *predictions.shape[1:]) for count in (cut, size - cut)]:
        return
    if not is_close(predictions, torch.cat(parts), choose_tolerance(evaluation.network.model)):
        raise InputError(
            f"{code_location(evaluation.recipe, 'predictions')}: those of a sample depend on the others of its batch: "
            "to compare samples, call all_gather(); to normalise, use nn.BatchNorm, nn.GroupNorm or nn.LayerNorm"
        )
