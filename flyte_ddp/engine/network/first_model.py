"""The network that a training starts with, with or without its values.

A rank that gets its part of the values from rank 0 starts without them: its tensors are on torch's meta device, and
take no memory.
"""

import gc
import warnings
from itertools import zip_longest
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, distributed, nn

from flyte_ddp.engine.checkpoints.warm_start import freeze, is_checkpoint, load_init_weights, names_in_checkpoint
from flyte_ddp.engine.code_location import code_location
from flyte_ddp.engine.collectives import broadcast_value, gather_values
from flyte_ddp.engine.compiler_compat import records_graphs
from flyte_ddp.engine.job import Job
from flyte_ddp.engine.sharding.sharding import give_room
from flyte_ddp.errors import InputError
from flyte_ddp.model_files.frozen_base import frozen_weights
from flyte_ddp.recipe import Recipe, seeded_model

Outline = list[tuple[Any, ...]]  # as outline returns it
First = tuple[nn.Module, set[str], list[str]]  # as first_model returns it


def first_model(recipe: Recipe, job: Job) -> First:
    """Build the network on the CPU, with the values of model() and of a file of weights in job.init; a collective.

    The layers that settings.freeze names are frozen. If job.init is a checkpoint, it is not loaded here.

    With sharding on several ranks, only rank 0 builds the network with values. The other ranks build it on torch's meta
    device, where it takes no memory. If model() cannot do that on a rank, this rank builds it with values, too, and a
    remark on all ranks says so. Without sharding, each rank builds it with values, and the ranks exchange nothing.

    Returns:
        1. The network.
        2. The names, as rank 0 has them, of the frozen weights that keep model()'s values. Files of weights leave these
           out.
        3. Remarks for the user. Those on init and freezing come from ranks that have values alone.

    Raises:
        InputError: The network, or the settings of init or freeze, cannot be used. With sharding, rank 0 may be the
            only rank that raises this. Or, with sharding, a rank has built other tensors than rank 0; all ranks raise
            this.
    """
    rank = distributed.get_rank()
    if job.options.sharding == "off" or distributed.get_world_size() == 1:
        return _with_values(recipe, job)
    built = None
    problem = ""
    if rank == 0:
        built = _with_values(recipe, job)
    else:
        try:
            built = _without_values(recipe, job), set[str](), list[str]()
        except Exception as error:  # of many types: model() may do with its tensors what it likes
            problem = f"{type(error).__name__}: {' '.join(str(error).split())}"
    expected, base = broadcast_value((outline(built[0]), built[1]) if built and rank == 0 else None)
    if built and outline(built[0]) != expected:
        built = None
        problem = "it has other tensors where they have no values"
    problems = gather_values(problem)
    model, _, remarks = built or _with_values(recipe, job)
    if any(problems):  # what was built with values has not been compared yet
        _refuse_other_tensors(recipe, outline(model), expected)
    for problem in [*filter(None, problems)][:1]:
        remarks.append(f"Ranks built the whole network in their host's memory, since model() needs values: {problem}")
    return model, base, remarks


def outline(model: nn.Module) -> Outline:
    """Return what must be alike on ranks that exchange a network tensor by tensor.

    Returns:
        For each parameter and buffer: its name, dtype and shape, whether it is trained, and a number that only tied
        tensors share.
    """
    named = *model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)
    numbers: dict[int, int] = {}
    return [
        (name, tensor.dtype, tensor.shape, tensor.requires_grad, numbers.setdefault(id(tensor), len(numbers)))
        for name, tensor in named
    ]


def _refuse_other_tensors(recipe: Recipe, own: Outline, expected: Outline) -> None:
    """Raise InputError on all ranks if any rank's outline() of the network differs from `expected`; a collective.

    Args:
        recipe: the recipe, for the message.
        own: this rank's outline.
        expected: rank 0's outline.
    """
    differing = (mine or first for mine, first in zip_longest(own, expected) if mine != first)
    for rank, tensor in enumerate(gather_values(next(differing, None))):
        if tensor:
            raise InputError(
                f"{code_location(recipe, 'model')} must build the same network on all ranks, but rank {rank} and rank "
                f"0 have another {tensor[0]}: let nothing in it depend on the rank, its host or what is installed there"
            )


def _with_values(recipe: Recipe, job: Job) -> First:
    """Build the network with values on this rank's CPU, and check that it can be trained; not a collective.

    The layers that settings.freeze names are frozen. The values are those of model(), except for what init gives:

    - A file of weights: its weights replace those of model().
    - A folder: model() itself must have read it.
    - A checkpoint: it is not loaded here.

    Returns:
        The network; the names of the frozen weights that keep model()'s values; and remarks for the user.

    Raises:
        InputError: The network, or the settings of init or freeze, cannot be used.
    """
    settings = job.settings
    init = job.init
    if settings.init_leave_out and not init:
        raise InputError(f"init_leave_out must be empty without init, got {settings.init_leave_out!r}")
    model = _call_model(recipe)
    remarks = []
    if init and init.is_dir():
        _check_folder(recipe, init)
        remarks.append(f"Starts from the folder {init.name}")
    base = {*frozen_weights(model)}
    if init and init.is_file():
        if is_checkpoint(init):
            base -= names_in_checkpoint(init)
        else:
            taken, remark = load_init_weights(model, init, settings.init_leave_out)
            remarks.append(remark)
            base -= taken
    if settings.freeze:
        remarks.append(freeze(model, settings.freeze))
    check_types(recipe, model)
    _check_layers(recipe, model)
    return model, base, remarks


def _without_values(recipe: Recipe, job: Job) -> nn.Module:
    """Build the network on torch's meta device, where tensors have no values and take no memory, and return it.

    The layers that settings.freeze names are frozen. Nothing is loaded from init.

    Raises:
        InputError: model() returns no network, or one with a lazy layer. A pattern of settings.freeze matches nothing.
            Or this process has a meta tensor that is neither a parameter nor a buffer of the network.
        RuntimeError: A tensor of the network has a view, so it cannot get memory later.
        Exception: model() needs values; it may raise any error without them.
    """
    with torch.device("meta"), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch warns of each tensor that model() loads: it gets no values here
        model = _call_model(recipe)
    if job.settings.freeze:
        freeze(model, job.settings.freeze)
    tensors = {id(tensor): tensor for tensor in (*model.parameters(), *model.buffers())}
    # Layers and recipes may keep a tensor anywhere, and only the garbage collector knows all of them. The first use of
    # such a tensor would fail on this rank alone, although the network trains without sharding.
    gc.collect()
    for candidate in gc.get_objects():
        if issubclass(type(candidate), Tensor) and candidate.is_meta and id(candidate) not in tensors:
            raise InputError(f"a tensor of shape {tuple(candidate.shape)} is neither a parameter nor a buffer")
    for tensor in tensors.values():
        if tensor.is_meta:
            give_room(tensor, tensor.device)  # a trial: it would otherwise fail later, on this rank alone
    return model


def _call_model(recipe: Recipe) -> nn.Module:
    """Call the recipe's model() with seeded random generators, and return its network.

    Afterwards recipe.has_read_init tells whether this call of model() has read the folder that init names.

    Raises:
        InputError: model() returned no nn.Module, or a lazy layer whose parameters have no shape yet.
    """
    recipe.has_read_init = False  # the recipe may have read something else before, such as a tokenizer
    model: Any = seeded_model(recipe)
    if not isinstance(model, nn.Module):
        got = type(model).__name__
        raise InputError(f"{code_location(recipe, 'model')} must return the network, an nn.Module, got {got}")
    lazy = [name for name, parameter in model.named_parameters() if nn.parameter.is_lazy(parameter)]
    if lazy:
        raise InputError(
            f"{code_location(recipe, 'model')}: {lazy[0]} has no shape yet: call the network once in model(), on "
            "zeros of a batch's shape, or name the layer's size"
        )
    return model


def _check_folder(recipe: Recipe, init: Path) -> None:
    """Raise InputError if model() has not read the folder that init names, or if settings.init_leave_out is set.

    init_leave_out only works for an init that is a file. Call this after model().
    """
    if not recipe.has_read_init:
        raise InputError(
            f"{code_location(recipe, 'model')} must load init, which is the folder {init}: for example with "
            "from_pretrained(self.init_path), or give a file"
        )
    if recipe.settings.init_leave_out:
        raise InputError(
            f"init_leave_out must be empty, because model() itself loads the folder {init}, got "
            f"{recipe.settings.init_leave_out!r}"
        )


def _check_layers(recipe: Recipe, model: nn.Module) -> None:
    """Raise InputError for a layer that torch cannot train, or that a checkpoint cannot resume.

    These layers are refused:

    - Trainable layers of torch.jit, whose copies get no gradients.
    - nn.SyncBatchNorm with virtual ranks, since it needs the statistics of other parts of the batch.
    - nn.SyncBatchNorm with micro_batch = -1 on several ranks, since the other ranks would wait in this layer for a rank
      that lacks memory.
    - Recurrent layers with dropout on a GPU, since cuDNN draws it from a state that no checkpoint has.
    - Layers compiled into CUDA graphs, which overwrite the outputs of their previous pass.
    """
    # What is said of cuDNN was read in torch's source, and not tried on a GPU
    virtual_ranks = recipe.settings.virtual_ranks
    for name, layer in model.named_modules():
        problem = ""
        if isinstance(layer, torch.jit.ScriptModule) and any(weight.requires_grad for weight in layer.parameters()):
            problem = (
                "must not come from torch.jit, or must be frozen, since its copies have no gradients: return the "
                "module that it was made of"
            )
        elif isinstance(layer, nn.SyncBatchNorm) and virtual_ranks:
            problem = (
                f"must not be nn.SyncBatchNorm with virtual_ranks, got {virtual_ranks}, since a part of a batch is "
                "computed without the others: leave convert_sync_batchnorm out, or set virtual_ranks to 0"
            )
        elif isinstance(layer, nn.SyncBatchNorm) and recipe.micro_batch < 0 and distributed.get_world_size() > 1:
            problem = (
                f"must not be nn.SyncBatchNorm with micro_batch = {recipe.micro_batch}, since the others would wait in "
                "it for a rank that lacks memory: give micro_batch a number of samples, or leave "
                "convert_sync_batchnorm out"
            )
        elif isinstance(layer, nn.RNNBase) and layer.dropout and layer.num_layers > 1 and recipe.device.type == "cuda":
            kind = type(layer).__name__
            problem = (
                f"must have no dropout on a GPU, where cuDNN draws it by a state that no checkpoint has: give {kind} "
                f"none, and put nn.Dropout between layers of one nn.{kind} each"
            )
        elif records_graphs(layer):
            problem = (
                "must not be compiled into CUDA graphs, in which a pass overwrites the outputs of the one before, as "
                'of another part of the batch: choose mode="max-autotune-no-cudagraphs", or the default'
            )
        if problem:
            raise InputError(f"{code_location(recipe, 'model')}: {name or 'the network'} {problem}")


def check_types(recipe: Recipe, model: nn.Module) -> None:
    """Check the dtype of each weight.

    Raises:
        InputError: A trained weight is not float32, or a frozen one neither float32 nor bfloat16.
    """
    for name, weight in model.named_parameters():
        if weight.dtype == torch.float32 or (weight.dtype == torch.bfloat16 and not weight.requires_grad):
            continue
        rule, remedy = "what is trained must be float32", "call float() on it"
        if weight.dtype.itemsize < torch.float32.itemsize:
            rule += ", or small updates are lost"
        if not weight.requires_grad:
            rule, remedy = "what is frozen must be float32 or bfloat16", "call bfloat16() on it"
        remedy += ", or give from_pretrained a dtype (precision decides what is computed in)"
        if not weight.is_floating_point():  # which neither float() nor bfloat16() changes
            remedy = "register_buffer() it instead"
            if weight.is_complex() and weight.requires_grad:
                remedy = "keep torch.view_as_real of it as the parameter, and let forward call torch.view_as_complex"
        kind = str(weight.dtype).removeprefix("torch.")
        raise InputError(f"{code_location(recipe, 'model')}: {name} is {kind}, but {rule}: {remedy}")
