"""Each private part of another library that ours touches is there, and does what it is touched for."""

import ast
import importlib
import inspect
import os
import re
import subprocess
import sys
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Iterator, List, Set

import pytest
import torch
from flytekit import Cache, Deck, task
from flytekit.core.checkpointer import SyncCheckpoint
from flytekit.exceptions.user import FlyteRecoverableException, FlyteUserRuntimeException
from flytekit.interaction.click_types import FileParamType, JsonParamType, UnionParamType
from torch import distributed, nn
from torch.nn.parallel import DistributedDataParallel

from flyte_ddp.engine import torch_compat
from flyte_ddp.engine.torch_compat import TorchDispatchMode, pytree
from flyte_ddp.launch import launch_compat
from flyte_ddp.tasks import flytekit_compat
from flyte_ddp.tasks.execution import TaskFailed, TaskInterrupted

ROOT = Path(__file__).parents[1]


def _environment():
    return {**os.environ, "PYTHONPATH": str(ROOT)}


# --- flytekit ---


@dataclass
class Size:
    pixels: int
    text: str = ""


class Smaller(Size):
    pass


def test_json_inputs_of_ours_are_read_by_us(monkeypatch):
    monkeypatch.setattr(JsonParamType, "_parse", JsonParamType._parse)  # put back afterwards
    for pixels in (7, 8):
        flytekit_compat.read_json_inputs(Size, partial(Smaller, pixels))
    assert JsonParamType(Smaller).convert("as it comes", None, None) == Smaller(8, "as it comes")
    assert JsonParamType(dict).convert('{"pixels": 1}', None, None) == {"pixels": 1}


def test_an_input_of_several_kinds_tells_them():
    kinds = [FileParamType(), JsonParamType(dict)]
    assert sorted(map(str, flytekit_compat.alternatives(UnionParamType(kinds)))) == sorted(map(str, kinds))


calls: List[int] = []


@task(cache=Cache(version="1"))
def counted(number: int) -> int:
    calls.append(number)
    return number


def test_the_local_cache_can_be_listed_and_what_is_dropped_is_made_anew():
    calls.clear()
    for _ in range(2):
        counted(number=1)
    cache = flytekit_compat.local_cache()
    (key,) = [key for key in cache if "test_compat.counted" in key]
    assert b"o0" in cache[key]
    del cache[key]
    counted(number=1)
    assert calls == [1, 1]


def test_metadata_of_a_task_hold_while_the_block_runs():
    calls.clear()
    registered = counted.metadata
    with flytekit_compat.metadata_of(counted, replace(registered, cache=False)):
        for _ in range(2):
            counted(number=2)
    for _ in range(2):
        counted(number=2)
    assert calls == [2, 2, 2]
    assert counted.metadata is registered


def test_a_checkpoint_tells_where_it_goes_and_where_the_one_before_is(tmp_path):
    (tmp_path / "mine").write_text("saved")
    for name in ("new", "old"):
        (tmp_path / name).mkdir()
    checkpoint = SyncCheckpoint(str(tmp_path / "new"), str(tmp_path / "old"))
    checkpoint.save(tmp_path / "mine")
    assert Path(flytekit_compat.checkpoint_destination(checkpoint), "mine").read_text() == "saved"
    assert flytekit_compat.checkpoint_source(checkpoint) == str(tmp_path / "old")
    assert flytekit_compat.checkpoint_source(SyncCheckpoint(str(tmp_path / "new"))) is None


def test_html_of_a_deck_is_replaced():
    deck = Deck("Training", "first")
    flytekit_compat.replace_html(deck, "second")
    assert deck.html == "second"


@pytest.mark.parametrize(
    ("own", "other"), [(TaskFailed, FlyteUserRuntimeException), (TaskInterrupted, FlyteRecoverableException)]
)
def test_an_exception_goes_by_the_error_code_of_another(own, other):
    assert own.error_code == FlyteUserRuntimeException(own("reason")).error_code == other.error_code


# --- wandb ---

KILL = """if True:
    import os, wandb
    from flyte_ddp.report.wandb_compat import kill_service
    kill_service()  # where none has begun
    run = wandb.init(mode="offline", settings=wandb.Settings(silent=True, console="off"))
    run.log({"loss": 1.0})
    kill_service()
    print(os.waitstatus_to_exitcode(os.waitpid(-1, 0)[1]))
"""


def test_wandbs_own_process_is_killed_and_not_waited_for(tmp_path):
    command = [sys.executable, "-c", KILL]
    with subprocess.Popen(
        command, cwd=tmp_path, env={**_environment(), "WANDB_DIR": str(tmp_path)}, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout
        assert process.stdout.readline() == "-9\n"
        process.kill()  # wandb's own end of a run whose process has gone is not what is tested


# --- torch ---


def test_trees_are_taken_apart_and_put_together():
    tree = {"b": (torch.ones(2), [torch.zeros(3)]), "a": torch.ones(4)}
    leaves, structure = pytree.tree_flatten(tree)
    assert [len(leaf) for leaf in leaves] == [len(leaf) for leaf in pytree.tree_leaves(tree)] == [2, 3, 4]
    assert pytree.tree_unflatten([1, 2, 3], structure) == {"b": (1, [2]), "a": 3}
    assert pytree.tree_map(lambda one, other: len(one) + len(other), tree, tree) == {"b": (4, [6]), "a": 8}
    (path, _), *_ = pytree.tree_flatten_with_path(tree)[0]
    assert isinstance(path[0], pytree.MappingKey)
    assert path[0].key == "b"


def test_a_dispatch_mode_sees_the_operations_within_a_layer_by_their_arguments():
    seen = {}

    class Seeing(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            seen[func.name()] = torch_compat.argument_names(func)
            return func(*args, **(kwargs or {}))

    with Seeing():
        nn.RNN(2, 2, num_layers=2, dropout=0.5)(torch.ones(3, 1, 2))
    assert seen["aten::bernoulli_.float"] == ["self", "p", "generator"]


@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.Adam])
def test_a_fused_optimizer_heeds_the_flag_and_another_says_that_it_does_not(kind):
    weight, flag = nn.Parameter(torch.ones(3)), torch.zeros(())
    weight.grad = torch.ones(3)
    fused = kind([weight], lr=0.1, fused=True)
    assert torch_compat.guard_steps(fused, flag)
    fused.step()
    assert weight.max() < 1
    before = weight.detach().clone()
    flag.fill_(1)
    fused.step()
    assert torch.equal(weight, before)
    assert not torch_compat.guard_steps(kind([weight], lr=0.1, fused=False), flag)


def test_many_tensors_are_measured_and_changed_in_one_call():
    tensors, targets = [torch.tensor([3.0, 4.0]), torch.full((2, 2), 2.0)], [torch.zeros(2), torch.zeros(2, 2)]
    assert torch_compat.norms(tensors).tolist() == [5, 4]
    torch_compat.scale(tensors, torch.tensor(2.0))
    assert torch_compat.norms(tensors).tolist() == [10, 8]
    torch_compat.move_towards(tensors, targets, 0.25)
    assert torch_compat.norms(tensors).tolist() == [7.5, 6]
    torch_compat.copy(tensors, targets)
    assert torch_compat.norms(tensors).tolist() == torch_compat.norms(targets).tolist()


@pytest.mark.parametrize("shape", [(4, 3), (4, 3, 2), (4, 3, 2, 2), (4, 3, 2, 2, 2)])
def test_any_batch_norm_takes_any_number_of_dimensions(shape):
    layer = torch_compat.AnyBatchNorm(3)
    assert abs(layer(torch.rand(shape)).mean()) < 1e-6
    assert set(layer.state_dict()) == set(nn.BatchNorm1d(3).state_dict())


COMPILER = """if True:
    import sys, torch
    from torch import distributed, nn
    from torch.nn.parallel import DistributedDataParallel
    from flyte_ddp.engine import torch_compat
    torch_compat.leave_dynamo_out()
    distributed.init_process_group("gloo", init_method="file://" + sys.argv[1], rank=0, world_size=1)
    model = DistributedDataParallel(nn.Linear(2, 2))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with torch_compat.inductor_left_out(), torch.profiler.profile() as profiler:
        for _ in range(2):
            model(torch.ones(2)).sum().backward()
            optimizer.step()
            profiler.step()
    distributed.destroy_process_group()
    print([name for name in sys.modules if name.startswith(("torch._dynamo", "torch._inductor"))])
"""


def test_neither_ddp_nor_optimizers_nor_the_profiler_bring_the_compiler(tmp_path):
    command = [sys.executable, "-c", COMPILER, str(tmp_path / "store")]
    done = subprocess.run(command, cwd=ROOT, env=_environment(), capture_output=True, text=True, timeout=300)
    assert done.stdout == "['torch._dynamo']\n", done.stderr


# --- what the launcher touches: tests/launch/test_hang.py has processes that hang, or are left behind ---


def test_a_rank_counts_its_collectives(tmp_path):
    assert launch_compat.standing(0) == (0, True)
    distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        before, _ = launch_compat.standing(0)
        distributed.all_reduce(torch.ones(1))
        model = DistributedDataParallel(nn.Linear(1, 1))
        between, _ = launch_compat.standing(0)
        model(torch.ones(1)).backward()
        after, is_idle = launch_compat.standing(0)
    finally:
        distributed.destroy_process_group()
    assert before < between < after
    assert is_idle


# --- and nothing else ---

PRIVATE = re.compile(r"_(?!_)\w+|__\w+(?<!__)")
NAMED_TUPLES = {"_asdict", "_fields", "_make", "_replace"}
DOCUMENTED = {"os._exit", "sys._getframe"}
OURS = ("flyte_ddp", "workflows", "examples")


def _touched(tree: ast.Module) -> Iterator[str]:
    """Private names of others that code names outright. `self` counts as ours only within a class."""
    inside = {
        node for owner in ast.walk(tree) if isinstance(owner, ast.ClassDef) for node in ast.walk(owner)
    }  # nodes are compared by identity
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and PRIVATE.fullmatch(node.attr) and node.attr not in NAMED_TUPLES:
            own = isinstance(node.value, ast.Name) and node.value.id in ("self", "cls") and node in inside
            if not own and ast.unparse(node) not in DOCUMENTED:
                yield ast.unparse(node)
        elif isinstance(node, (ast.Import, ast.ImportFrom)):
            module = getattr(node, "module", None) or ""
            names = [f"{module}.{alias.name}" for alias in node.names]
            yield from (name for name in names if any(PRIVATE.fullmatch(part) for part in name.split(".")))
        elif isinstance(node, ast.Call) and ast.unparse(node.func) in ("getattr", "setattr", "hasattr", "delattr"):
            name = node.args[1]
            if isinstance(name, ast.Constant) and PRIVATE.fullmatch(str(name.value)):
                yield ast.unparse(node)


def _shared(module: str, tree: ast.Module) -> Iterator[str]:
    """Private names that a class of ours has in common with a base of another library, whose they are then."""
    for owner in tree.body:
        if isinstance(owner, ast.ClassDef):
            bases = [
                base
                for base in getattr(importlib.import_module(module), owner.name).__mro__
                if not base.__module__.startswith(OURS)
            ]
            yield from (f"{owner.name}.{name}" for name in _named(owner) & {x for b in bases for x in _names_of(b)})


def _named(owner: ast.ClassDef) -> Set[str]:
    names = {node.attr for node in ast.walk(owner) if isinstance(node, ast.Attribute)}
    names |= {node.id for node in ast.walk(owner) if isinstance(node, ast.Name)}
    names |= {node.name for node in ast.walk(owner) if isinstance(node, ast.FunctionDef)}
    return {name for name in names if PRIVATE.fullmatch(name)} - NAMED_TUPLES


def _names_of(base: type) -> Iterator[str]:
    yield from vars(base)
    with suppress(OSError, TypeError):  # it may have no source
        yield from re.findall(r"\b(?:self|cls)\.(_\w+)", inspect.getsource(base))


def test_no_other_file_touches_a_private_part():
    found = {}
    for file in sorted(file for folder in OURS for file in (ROOT / folder).rglob("*.py")):
        if not file.name.endswith("_compat.py"):
            name, tree = file.relative_to(ROOT).with_suffix(""), ast.parse(file.read_text())
            is_class = any(isinstance(node, ast.ClassDef) and node.bases for node in tree.body)
            is_class = is_class and "template" not in file.parts  # which cannot be imported from where it lies
            touched = {*_touched(tree), *(_shared(".".join(name.parts), tree) if is_class else ())}
            if touched:
                found[str(name)] = touched
    assert not found, "it belongs in a file whose name ends in _compat, with its test here"
