"""Ways to fit a training into memory: layers computed again for the backward pass, and a share cut into parts."""

import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from flyte_ddp.engine.attributes import matching_layers
from flyte_ddp.engine.batches.batches import Batch, TrainBatches
from flyte_ddp.engine.batches.sample_seeds import generators_restored
from flyte_ddp.engine.collectives import all_reduce_flags
from flyte_ddp.engine.state import TrainingState
from flyte_ddp.engine.torch_compat import any_batch_size
from flyte_ddp.errors import InputError
from flyte_ddp.launch.failures import is_out_of_memory
from flyte_ddp.recipe import Recipe


def checkpoint_activations(recipe: Recipe, model: nn.Module, changing: Sequence[str]) -> None:
    """Have layers keep only their inputs for the backward pass, which then computes the layers once more.

    This is activation checkpointing (Chen et al. 2016, arXiv 1604.06174), of the layers that
    Recipe.activation_checkpointing names. Their `forward` is replaced. The second computation draws the same random
    numbers. Without gradients a layer computes once.

    Args:
        recipe: the recipe.
        model: the network.
        changing: the names of the buffers that a forward pass changes.

    Raises:
        InputError: A layer has a buffer that a forward pass changes: it would change twice in a step. Or a pattern in
            activation_checkpointing matches no layer.
    """
    for name, layer in matching_layers(recipe, "activation_checkpointing", model).items():
        twice = next((buffer for buffer in changing if buffer.startswith(f"{name}.")), "")
        if twice:
            raise InputError(
                f"{type(recipe).__name__}.activation_checkpointing must not match {name}, as each forward pass changes "
                f"the buffer {twice}, and a step would have two: use nn.GroupNorm for batch norm, or name other layers"
            )
        layer.forward = partial(_forward, layer.forward)


def _forward(forward: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
    if not torch.is_grad_enabled():
        return forward(*args, **kwargs)
    if torch.compiler.is_compiling():
        return checkpoint(forward, *args, use_reentrant=False, **kwargs)
    return checkpoint(forward, *args, use_reentrant=False, context_fn=_drawing_alike, **kwargs)


def _drawing_alike() -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
    """Return two context managers, in which a layer's first and second computation draw the same random numbers.

    The states of Python's and NumPy's random generators are stored now. The second context manager starts the
    generators from these states, and restores them at its end. torch.utils.checkpoint itself takes care of torch's
    generators.
    """
    states = random.getstate(), np.random.get_state()

    @contextmanager
    def again() -> Iterator[None]:
        with generators_restored():
            random.setstate(states[0])
            np.random.set_state(states[1])
            yield

    return nullcontext(), again()


def choose_micro_batch(state: TrainingState, train: TrainBatches) -> str:
    """Set state.micro_batch to a number of samples that fit into memory at once on all ranks; a collective.

    Call this for a recipe with micro_batch = -1, which is refused with virtual ranks and with sharding. The first trial
    takes the checkpoint's number, or else as many samples as a rank has at most in a step. The number is halved until
    each rank can compute the gradients of that many samples. Each trial takes samples of the first batch of epoch 0, so
    later batches of longer samples may need more memory. The trials change no weights.

    Args:
        state: the training; after a resume, state.micro_batch is the checkpoint's.
        train: the batches of the training.

    Returns:
        A remark on the number, for the log.

    Raises:
        InputError: A single sample does not fit on some rank. All ranks raise it.
    """
    batch = next(train.epoch(0))
    shares = train.virtual_ranks or train.world_size
    most = state.micro_batch if state.micro_batch > 0 else -(-train.batch_size // shares)
    while any(all_reduce_flags([not _fits(state, batch.parts(most)[0])], state.device)):
        if most == 1:
            raise InputError(
                "a step with a single sample does not fit into memory: choose a smaller network, or name layers in the "
                "recipe's activation_checkpointing"
            )
        most = -(-most // 2)
    state.micro_batch = most
    return f"micro_batch: {most} samples of a rank at a time fit into memory"


def _fits(state: TrainingState, part: Batch) -> bool:
    """Return whether this rank has memory for the gradients of these samples and the optimizer's state.

    A forward and backward pass is tried. It changes no weight, buffer or gradient. Each rank gets its own answer. The
    network must exchange nothing, because other ranks would wait for a rank that lacks memory. Errors other than a lack
    of memory are raised.
    """
    weights = [weight for weight in state.model.parameters() if weight.requires_grad]
    before = state.buffers.copy()
    try:
        # A first step allocates the optimizer's state: for Adam twice the weights, and seldom more
        reserved = [] if state.optimizer.state else [torch.empty_like(weight) for weight in [*weights, *weights]]
        with any_batch_size():
            loss = state.parallel.module.train()(part, (False, False), False)
            torch.autograd.grad(loss, weights, allow_unused=True)
        del reserved
        return True
    except RuntimeError as error:
        if not is_out_of_memory(error):
            raise
        return False
    finally:
        before.put_back()
        if state.device.type == "cuda":
            torch.cuda.empty_cache()
