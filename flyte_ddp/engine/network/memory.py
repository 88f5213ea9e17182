"""Ways to fit a training into memory: layers computed again for the backward pass, and a share cut into parts."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from flyte_ddp.engine.attributes import matching_layers
from flyte_ddp.engine.batches.batches import Batch, TrainBatches
from flyte_ddp.engine.collectives import all_reduce_flags
from flyte_ddp.engine.state import TrainingState
from flyte_ddp.engine.torch_compat import any_batch_size
from flyte_ddp.errors import InputError
from flyte_ddp.launch.failures import is_out_of_memory
from flyte_ddp.recipe import Recipe


def checkpoint_activations(recipe: Recipe, model: nn.Module, changing: Sequence[str]) -> None:
    """Have the layers that Recipe.activation_checkpointing names keep only their inputs for the backward pass.

    The backward pass computes them again (Chen et al. 2016, arXiv 1604.06174), drawing the same random numbers. The
    layers' `forward` is replaced. `changing` names the buffers that a forward pass changes.

    Raises:
        InputError: A layer has such a buffer, which would change twice in a step.
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
    return checkpoint(forward, *args, use_reentrant=False, **kwargs)


def choose_micro_batch(state: TrainingState, train: TrainBatches) -> str:
    """Set state.micro_batch to as many samples as fit into memory at once on all ranks; a collective.

    Call it for a recipe with micro_batch = -1. The search begins with the checkpoint's number, or else with a rank's
    whole share, and halves the number until each rank can compute gradients of so many samples. The tries change no
    weights.

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
    """Return whether this rank has memory to compute the gradients of these samples, and for the optimizer's state.

    It runs a forward and backward pass. False means that torch, or a library below it, lacked memory. Buffers are put
    back afterwards, and no weight or gradient changes. With sharding all ranks must call it. Even then each returns its
    own answer.

    Args:
        state: the training.
        part: the samples.
    """
    weights = [weight for weight in state.model.parameters() if weight.requires_grad]
    before = state.copy_buffers()
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
