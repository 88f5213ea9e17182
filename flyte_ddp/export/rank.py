"""Export in processes of its own: one measures a model and writes it, and one for each file reads that and measures."""

import dataclasses
import inspect
import textwrap
from pathlib import Path
from typing import Any, Union

import torch
from torch import Tensor, nn

from flyte_ddp.engine.batches import Split, TestBatches
from flyte_ddp.engine.measures import headline_of, pairs_of, ratios, sums_of
from flyte_ddp.engine.results import metadata_of
from flyte_ddp.engine.set_up import load_recipe, open_split
from flyte_ddp.engine.torch_compat import pytree
from flyte_ddp.errors import InputError
from flyte_ddp.export import programs
from flyte_ddp.export.settings import FILES, ExportJob, Measured, VerifyJob, Written
from flyte_ddp.launch.environment import Environment
from flyte_ddp.launch.link import Link
from flyte_ddp.recipe import Recipe, load_weights
from flyte_ddp.recipes.classifier import Classifier
from flyte_ddp.share import Share
from flyte_ddp.storage import writing_to

CPU = torch.device("cpu")


def write(environment: Environment, link: Link, asked: ExportJob) -> Union[Written, str]:
    """Measures the weights of the job in float32 and writes them in each format; or what keeps it from that."""
    torch.set_num_threads(environment.threads)
    try:
        return _write(link, asked)
    except InputError as error:
        return error.message


def _write(link: Link, asked: ExportJob) -> Written:
    job, settings = asked.job, asked.job.identity.settings
    recipe = load_recipe(job, CPU)
    test, model = open_split(recipe, "test", job), recipe.model()
    try:
        model.load_state_dict(load_weights(job.model_path))
    except Exception as error:  # of zipfile, pickle and torch
        raise InputError(
            f"model_state is no file of weights for this network: {_first_lines(error)}: give that of a training of it"
        ) from None
    model.eval().to(memory_format=torch.contiguous_format)
    measured = measure(recipe, model, test, settings.test_batch_size, link)
    few, more = (
        programs.call_of(recipe, model, batch_of(recipe, test, count), count) for count in (programs.FEW, programs.MORE)
    )
    headline = headline_of(recipe, measured.measures)
    metadata = metadata_of(recipe, job, headline, measured.measures, asked.training)
    metadata = dataclasses.replace(metadata, settings=asked.settings)
    program = None
    for name in asked.formats:
        try:
            if name != "safetensors" and program is None:
                program = programs.trace(model, few, more)
            path = Path(asked.folder, FILES[name])
            with writing_to(path.parent, "DDP_RUNS_DIR"):
                programs.write(name, path, model, None if name == "safetensors" else program, few, metadata.as_json())
        except InputError:  # a full disk
            raise
        except Exception as error:  # torch's own, of a hundred types
            raise InputError(
                f"the network cannot be exported to {name}: {_first_lines(error)}: change its forward, or leave {name} "
                "out of formats"
            ) from None
        link.alive()
    inputs, outputs = programs.specs_of(model, few, more)
    return Written(
        measured=measured,
        metadata=metadata,
        shares=recipe.shares,
        samples=recipe.samples,
        test_samples=len(test),
        parameters=sum(one.numel() for one in model.parameters()),
        before=source_before(recipe),
        inputs=inputs,
        outputs=outputs,
        structure=pytree.treespec_dumps(pytree.tree_structure(few.outputs)),
    )


def verify(environment: Environment, link: Link, asked: VerifyJob) -> Union[Measured, str]:
    """What a file gives for the test split, also one sample at a time; or what keeps it from that."""
    torch.set_num_threads(environment.threads)
    recipe = load_recipe(asked.job, CPU)
    test = open_split(recipe, "test", asked.job)
    try:
        network = programs.open_network(asked.format, Path(asked.path), recipe.model(), asked.structure)
        with torch.inference_mode():
            recipe.forward(network, batch_of(recipe, test, 1))
        return measure(recipe, network, test, asked.job.identity.settings.test_batch_size, link)
    except Exception as error:
        return _first_lines(error)


@torch.inference_mode()
def measure(recipe: Recipe, network: nn.Module, test: Split, batch_size: int, link: Link) -> Measured:
    """In the batches of a training's own evaluation, on one rank, in float32."""
    names: Any = ()
    sums, rights, counts = torch.zeros(()), torch.zeros(0), torch.zeros(0)
    for batch in TestBatches(test, batch_size, rank=0, world_size=1):
        vars(recipe.share).update(vars(batch.share), alone=True)
        pairs = pairs_of(recipe, recipe.forward(network, batch.tree), batch, names)
        names, sums = tuple(pairs), sums + sums_of(pairs)
        if isinstance(recipe, Classifier):
            labels = batch.tree[1]
            rights = _sum(rights, labels.bincount(pairs["accuracy"][0]))
            counts = _sum(counts, labels.bincount())
        link.alive()
    classes = recipe.facts().get("classes", range(len(counts)))
    by_class = zip(classes, rights.tolist(), counts.tolist(), strict=False)
    shares = {str(name): right / count for name, right, count in by_class if count}
    return Measured(ratios(recipe, names, sums.tolist()), shares)


def _sum(one: Tensor, other: Tensor) -> Tensor:
    """Of (n,) and (m,), the shorter one followed by zeros."""
    size = max(len(one), len(other))
    padded = [torch.cat([part, part.new_zeros(size - len(part))]) for part in (one.double(), other.double())]
    return padded[0] + padded[1]


def batch_of(recipe: Recipe, test: Split, count: int) -> Any:
    """The first so many test samples; from the start again where there are fewer."""
    (tree,) = test.fetch(torch.arange(count) % len(test), [slice(0, count)])
    vars(recipe.share).update(vars(Share(0, count, count, alone=True)))
    return tree


def source_before(recipe: Recipe) -> str:
    """The recipe's own forward, if it has one: what it does to a batch before the network sees it is in no program."""
    if type(recipe).forward is Recipe.forward:
        return ""
    return textwrap.dedent(inspect.getsource(type(recipe).forward)).strip()


def _first_lines(error: Exception) -> str:
    """Of what torch says on a hundred lines."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {' '.join(lines[:2])[:300]}"
