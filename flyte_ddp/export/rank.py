"""Export in separate processes: one measures a model and writes it, then one for each file opens and measures it."""

import dataclasses
import inspect
import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from flyte_ddp.batch_share import BatchShare
from flyte_ddp.engine.batches.batches import Batch
from flyte_ddp.engine.batches.block_cache import BlockCache
from flyte_ddp.engine.batches.lengths import get_lengths
from flyte_ddp.engine.batches.splits import Split
from flyte_ddp.engine.evaluation import Pairs, measure
from flyte_ddp.engine.job import Job, Measured
from flyte_ddp.engine.load import load_recipe, load_split
from flyte_ddp.engine.results import build_metadata
from flyte_ddp.errors import InputError, ReportedError
from flyte_ddp.export import programs
from flyte_ddp.export.settings import FILES, ExportJob, Written
from flyte_ddp.launch.environment import Environment
from flyte_ddp.launch.link import Link
from flyte_ddp.recipe import CPU, Recipe
from flyte_ddp.recipes.classifier import Classifier
from flyte_ddp.whole_files import writing_to


def write_formats(environment: Environment, link: Link, asked: ExportJob) -> Written:
    """Measure the job's weights on the test split, in float32 on the CPU, and write the network in each format.

    Run this function in a process of its own, by run_alone. The caller checks the measures: the function writes the
    files whatever the measures are.

    Args:
        environment: the environment of this process.
        link: tells the parent process after each batch and each file that this process is alive.
        asked: the job, the formats, and the folder for the files, which must exist. If a format fails, the files of the
            formats before it stay in the folder.

    Returns:
        The measures of the weights, and the facts that the model card needs.

    Raises:
        InputError: The weights, the recipe or its data cannot be used, the recipe's forward does not call the network,
            the network cannot be exported to a format, or the folder cannot be written to.
        ReportedError: The data cannot be read.
    """
    torch.set_num_threads(environment.threads)
    recipe = load_recipe(asked.job, CPU)
    with BlockCache(environment) as cache:
        return _write_formats(recipe, load_split(recipe, "test", asked.job, cache), link, asked)


def _write_formats(recipe: Recipe, test: Split, link: Link, asked: ExportJob) -> Written:
    job = asked.job
    model = recipe.trained_model(job.model_path).to(memory_format=torch.contiguous_format)
    seen: list[tuple[Tensor, Tensor] | None] = []

    def collect_hits(batch: Batch, pairs: Pairs) -> None:
        seen.append(find_hits(recipe, batch.tree, pairs))

    measured = measure(recipe, model, test, link, on_batch=collect_hits)
    few, more = (
        programs.record_call(recipe, model, fetch_batch(recipe, test, indices), len(indices))
        for indices in pick_samples(test)
    )
    metadata = build_metadata(recipe, job, measured.headline, measured.measures, asked.training)
    metadata = dataclasses.replace(metadata, settings=asked.settings)
    program = None
    for name in asked.options.names:
        path = Path(asked.folder, FILES[name])
        try:
            with writing_to(asked.folder, "DDP_RUNS_DIR"):
                if name == "safetensors":
                    programs.save_weights(path, model, metadata.as_json())
                elif name == "pretrained":
                    programs.save_pretrained(path, model)
                else:
                    program = program or programs.trace(model, few, more)
                    programs.save_program(name, path, model, program, few)
        except InputError:  # the disk may be full
            raise
        except Exception as error:  # torch raises many types
            raise InputError(
                f"the network cannot be exported to {name}: {_first_lines(error)}: change its forward, or leave {name} "
                "out of formats"
            ) from None
        link.heartbeat()
    inputs, outputs = programs.describe_tensors(model, few, more)
    return Written(
        measured=measured,
        classes=class_accuracies(recipe, seen),
        metadata=metadata,
        samples=recipe.samples,
        parameters=sum(one.numel() for one in model.parameters()),
        before=source_before(recipe),
        inputs=inputs,
        outputs=outputs,
        call=programs.format_call(model, few),
    )


def measure_file(environment: Environment, link: Link, argument: tuple[Job, str, str]) -> Measured | str:
    """Measure an exported file on the test split, in float32 on the CPU.

    Run this function in a process of its own, by run_alone.

    Args:
        environment: the environment of this process.
        link: tells the parent process after each batch that this process is alive.
        argument: the job, the file's format, and the file's path.

    Returns:
        The measures; or a text that says why the file cannot be opened, or why its network cannot compute the split, or
        a batch of one sample.

    Raises:
        ReportedError: The data cannot be read.
        InputError: The recipe or its data are invalid.
    """
    job, name, path = argument
    torch.set_num_threads(environment.threads)
    recipe = load_recipe(job, CPU)
    with BlockCache(environment) as cache:
        test = load_split(recipe, "test", job, cache)
        try:
            network = programs.open_network(name, Path(path), recipe.initial_model())
            with torch.inference_mode():
                recipe.forward(network, fetch_batch(recipe, test, torch.tensor([0])))
            return measure(recipe, network, test, link)
        except ReportedError:  # the data cannot be read
            raise
        except Exception as error:
            return _first_lines(error)


def find_hits(recipe: Recipe, tree: Any, pairs: Pairs) -> tuple[Tensor, Tensor] | None:
    """Return the labels and the hits of a classifier's batch.

    Args:
        recipe: the recipe.
        tree: the batch.
        pairs: the batch's values and weights, (n,) each, by the measure's name.

    Returns:
        The labels (n,), whole numbers from 0, and the hits (n,): 1 where the prediction is right, else 0. None if the
        recipe is no Classifier, its "accuracy" is missing or has weights other than 1, or the labels are others.
    """
    if not isinstance(recipe, Classifier) or "accuracy" not in pairs or not isinstance(tree, (tuple, list)):
        return None
    labels = tree[1] if len(tree) > 1 else None
    hits, weights = pairs["accuracy"]
    if not isinstance(labels, Tensor) or labels.shape != hits.shape or labels.dtype not in (torch.int64, torch.uint8):
        return None
    return (labels, hits) if (labels >= 0).all() and (weights == 1).all() else None


def class_accuracies(recipe: Recipe, seen: Sequence[tuple[Tensor, Tensor] | None]) -> dict[str, float]:
    """Return the accuracy, from 0 to 1, of each class that has samples, by the class's name or number.

    Args:
        recipe: the recipe, whose facts() may name the classes; otherwise they are numbered from 0.
        seen: for each batch the labels (n,), whole numbers, and the hits (n,), 1.0 where the prediction is right and
            0.0 elsewhere; None for a batch without these.

    Returns:
        The accuracies by name; {} if `seen` is empty or has a None.
    """
    known = [found for found in seen if found]
    if not known or len(known) < len(seen):
        return {}
    labels, hits = (torch.cat(parts) for parts in zip(*known, strict=True))
    rights = labels.bincount(hits).tolist()
    counts = labels.bincount().tolist()
    classes = recipe.facts().get("classes", range(len(counts)))
    return {str(name): right / count for name, right, count in zip(classes, rights, counts, strict=False) if count}


def pick_samples(test: Split) -> tuple[Tensor, Tensor]:
    """Choose FEW (2) test samples for one call of the network, and MORE (3) for another; return their indices.

    If the samples have lengths, the two are the shortest of the split, and the three are the longest. Otherwise all are
    among the first three. Indices are repeated if the split has too few samples.

    Returns:
        (FEW,) and (MORE,) int64.
    """
    lengths = get_lengths(test)
    order = lengths.each.argsort(stable=True) if lengths else torch.arange(min(programs.MORE, len(test)))
    few, more = (torch.arange(count) % len(order) for count in (programs.FEW, programs.MORE))
    return order[few], order.flip(0)[more]


def fetch_batch(recipe: Recipe, test: Split, indices: Tensor) -> Any:
    """Return these test samples as a batch of their own, and set the recipe's share to all of it."""
    (tree,) = test.fetch([indices])
    count = len(indices)
    recipe.share = BatchShare(0, count, count, alone=True)
    lengths = get_lengths(test)
    return lengths.padded(tree, indices, indices) if lengths else tree


def source_before(recipe: Recipe) -> str:
    """Return the source of the recipe's own forward, which no exported file contains; "" if it has none."""
    if type(recipe).forward is Recipe.forward:
        return ""
    return textwrap.dedent(inspect.getsource(type(recipe).forward)).strip()


def _first_lines(error: Exception) -> str:
    """Return the start of an error's message: torch's messages can have a hundred lines."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {' '.join(lines[:2])[:300]}"
