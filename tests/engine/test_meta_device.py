"""A step on torch's meta device, whose tensors have no values: what a GPU would wait for, or find elsewhere, fails."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from flyte_ddp.code.user_code import find_code
from flyte_ddp.engine.batches.batches import TrainBatches
from flyte_ddp.engine.batches.block_cache import BlockCache
from flyte_ddp.engine.checks.trials import Network, Trials
from flyte_ddp.engine.job import job_in, make_subject
from flyte_ddp.engine.load import load_recipe, load_split
from flyte_ddp.engine.measures import augment, compute_pairs, trained_measure
from flyte_ddp.engine.torch_compat import TorchDispatchMode, pytree
from flyte_ddp.launch.environment import Environment, World
from flyte_ddp.launch.process_group import process_group
from flyte_ddp.settings import RunOptions
from tests.examples import RECIPES, data_of, init_of, small_settings

META, CPU = torch.device("meta"), torch.device("cpu")
# Their result is a number, or a shape, that the host waits for
WAITS = {"_local_scalar_dense", "nonzero", "is_nonzero", "masked_select", "unique_consecutive", "_unique2", "equal"}


class Unwaiting(TorchDispatchMode):
    """Raises an error for what makes the host wait for the device, and for operands on both."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.name().removeprefix("aten::").partition(".")[0]
        operands = [leaf for leaf in pytree.tree_leaves((args, kwargs or {})) if isinstance(leaf, Tensor)]
        devices = {one.device.type for one in operands if one.ndim or one.device == META}
        if name in WAITS and META.type in devices:
            raise AssertionError(f"{name} waits for the device")
        if len(devices) > 1 and name not in ("copy_", "_to_copy"):
            raise AssertionError(f"{name} has operands on {devices}")
        if name in ("copy_", "_to_copy") and operands[0].device != operands[-1].device == META:
            raise AssertionError(f"{name} copies to the host")
        if name == "index" and any(one.dtype == torch.bool and one.device == META for one in operands[1:]):
            raise AssertionError("a mask as an index waits for the device")
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.slow] * (name == "finetune_text")) for name in RECIPES]
)
def test_a_step_of_every_example_neither_waits_nor_mixes_devices(alone, tmp_path, name):
    if name.startswith("finetune"):
        pytest.importorskip("peft" if name == "finetune_text" else "timm")
    settings, data, init = small_settings(name), data_of(name), init_of(name)
    environment = Environment(World(1, 1, "gloo", "cpu"), 0, 0, f"file://{tmp_path}/rendezvous", 1)
    code = find_code(f"{name}.recipe:{RECIPES[name]}")
    subject = make_subject(code, settings, Path(data) if data else None, Path(init) if init else None)
    job = job_in(tmp_path, subject, RunOptions(loader_workers=0))
    with process_group(environment, 60), BlockCache(environment, 2**30) as cache:
        here = load_recipe(job, CPU)
        model = here.model()
        split = load_split(here, "train", job, cache)
        names = tuple(Trials(here, Network(model), split, torch.arange(8))().pairs)
        recipe = load_recipe(job, META)
        recipe.model()
        batches = TrainBatches(
            load_split(recipe, "train", job, cache), settings.batch_size, 1, 0, 1, recipe.passes_per_epoch,
            recipe.train_fraction, recipe.length_window, lambda *given: augment(recipe, *given),
        )  # fmt: skip
        model.to(META)
        with Unwaiting():
            batch = next(batches.epoch(0))
            recipe.share = batch.share
            pairs = compute_pairs(recipe, recipe.forward(model, batch.tree), batch, names)
            pairs[trained_measure(names)][0].sum().backward()
    reached = [name for name, weight in model.named_parameters() if weight.requires_grad and weight.grad is not None]
    assert reached
    assert {leaf.device for leaf in pytree.tree_leaves(batch.tree)} == {META}
