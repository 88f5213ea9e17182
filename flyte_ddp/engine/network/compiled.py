"""Networks compiled by torch.compile: each of the layers that Recipe.fsdp_units names by itself, or else all of it.

Layers that are alike share what is compiled for the first of them.
"""

import importlib.util
import os
import shutil
from collections.abc import Sequence
from contextlib import ExitStack, nullcontext
from dataclasses import replace
from itertools import chain

import torch
from torch import nn

from flyte_ddp.engine.attributes import matching_layers
from flyte_ddp.engine.batches.batches import Batch, EvaluationBatches, TrainBatches
from flyte_ddp.engine.batches.lengths import get_lengths
from flyte_ddp.engine.compiler_compat import allow_compiling
from flyte_ddp.engine.sharding.sharding import in_own_types
from flyte_ddp.engine.state import TrainingState
from flyte_ddp.engine.torch_compat import any_batch_size, is_batch_norm, only_deterministic, pytree
from flyte_ddp.errors import InputError
from flyte_ddp.launch.link import Link
from flyte_ddp.launch.phases import STARTING
from flyte_ddp.recipe import Recipe

WAYS = 8  # of calling a layer, such as for another size of batch, or for evaluation, that may be compiled


def check_device(device: torch.device) -> None:
    """Check that compiling pays on the device, and can be done.

    Raises:
        InputError: The device is a CPU, or Triton or a C compiler is missing.
    """
    if device.type == "cpu":
        raise InputError(
            "options.compile must be false without a GPU, got true: on CPUs a step may become slower by it; leave "
            "it out"
        )
    compiler = os.environ.get("CC") or shutil.which("gcc") or shutil.which("clang")
    if importlib.util.find_spec("triton") is None or compiler is None:
        raise InputError("options.compile needs Triton and a C compiler: install gcc in the image, or leave it out")


def compile_layers(recipe: Recipe, networks: Sequence[nn.Module]) -> None:
    """Have torch compile the layers of these networks when they are next called.

    The layers are those that Recipe.fsdp_units names; if it names none, the networks themselves. Their `forward` is
    replaced. The call also raises torch's limit on recompilations, and makes the choice of kernels deterministic, for
    the whole process.

    Raises:
        InputError: A pattern in fsdp_units matches no layer, or matches a ModuleList or ModuleDict.
    """
    # After a second size torch would compile code for all sizes, which may round differently from code for one size.
    # Which sizes a rank has seen depends on its parts, and so on the number of ranks
    dynamic = False if recipe.settings.virtual_ranks else None
    layers = [*chain.from_iterable(_layers(recipe, network) for network in networks)]
    allow_compiling(WAYS * len(layers))  # each layer may need code of its own, as for a number that differs by layer
    for layer in layers:
        # Module.compile would take the layer's hooks along
        layer.forward = torch.compile(layer.forward, dynamic=dynamic)


def _layers(recipe: Recipe, network: nn.Module) -> list[nn.Module]:
    return [*matching_layers(recipe, "fsdp_units", network).values()] or [network]


def compile_now(state: TrainingState, train: TrainBatches, test: EvaluationBatches, link: Link) -> None:
    """Compile the network now, by computing a batch of each size in training and in evaluation; a collective.

    Call compile_layers() before. Weights and buffers keep their values, and gradients are reset. The rank sends a
    heartbeat after each layer, because compiling may take long.

    Args:
        state: the training.
        train: the batches of the training; the first batch of epoch 0 is read.
        test: the batches of the evaluation; the first one is read.
        link: gets the heartbeats.

    Raises:
        InputError: Virtual ranks are set, and samples have different lengths or batch norm would see a single sample.
    """
    settings = state.recipe.settings
    if settings.virtual_ranks and get_lengths(train.split):
        raise InputError(
            "options.compile must be false with virtual_ranks and samples of different lengths, for each of which all "
            "would be compiled anew, got true: leave it out, or set virtual_ranks to 0"
        )
    if settings.virtual_ranks and 1 in train.sizes() and any(is_batch_norm(layer) for layer in state.model.modules()):
        raise InputError(
            "options.compile must be false where batch norm sees a part of one sample, which torch can't compile, got "
            "true: leave it out, or choose batch_size so that the parts of an epoch's last batch have two or more"
        )
    before = state.buffers.copy()
    with ExitStack() as hooks:
        for network in {state.model, state.evaluated}:
            for layer in _layers(state.recipe, network):
                hooks.callback(layer.register_forward_hook(lambda *_: link.heartbeat(STARTING)).remove)
        for batch in _of_all_sizes(train, next(train.epoch(0))):
            first, *others = state.cut_up(batch)
            for part in (first, *others[-1:]):  # the last part may be smaller
                with any_batch_size(), only_deterministic() if settings.virtual_ranks else nullcontext():
                    state.parallel.module.train()(part, (False, False), True).backward()
                state.parallel.zero_grad()
                link.heartbeat(STARTING)
        for batch in _of_all_sizes(test, next(iter(test))):
            state.recipe.share = batch.share
            with in_own_types(state.evaluated), torch.no_grad():
                state.recipe.forward(state.evaluated.eval(), batch.tree)
    before.put_back()


def _of_all_sizes(batches: TrainBatches | EvaluationBatches, batch: Batch) -> list[Batch]:
    """Return a batch of each size that this rank's part of a global batch can have in an epoch.

    All ranks get equally many batches, because layers may exchange something in each batch.

    Args:
        batches: the batches of the split, which tell the sizes. A size of 0 counts as 1.
        batch: gives the samples, which are repeated or left out to reach a size.
    """

    def of_size(size: int) -> Batch:
        times = -(-size // batch.share.count)
        tree = pytree.tree_map(lambda leaf: torch.cat([leaf] * times)[:size].clone(), batch.tree)
        return replace(batch, tree=tree, share=replace(batch.share, count=size))

    return [of_size(max(1, size)) for size in batches.sizes()]
