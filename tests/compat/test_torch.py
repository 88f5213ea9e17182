"""The private parts of torch that we use exist, and do what they are used for."""

import copy
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import distributed, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.flop_counter import FlopCounterMode

from flyte_ddp.engine import torch_compat
from flyte_ddp.engine.compiler_compat import uncompiled
from flyte_ddp.engine.torch_compat import TorchDispatchMode, pytree

ROOT = Path(__file__).parents[2]


def test_operations_become_deterministic_without_the_compiler():
    program = (
        "import sys, torch; from flyte_ddp.engine.torch_compat import may_round_to_tf32, prefer_deterministic\n"
        "prefer_deterministic()\n"
        "print(torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled())\n"
        "print(torch.utils.deterministic.fill_uninitialized_memory, 'torch._inductor' in sys.modules)\n"
        "for flag in (torch.backends.cuda.matmul, torch.backends.cudnn):\n"
        "    flag.allow_tf32 = False\n"
        "print(may_round_to_tf32()); torch.set_float32_matmul_precision('high'); print(may_round_to_tf32())\n"
        "torch.set_float32_matmul_precision('highest'); torch.backends.fp32_precision = 'tf32'\n"
        "print(may_round_to_tf32())\n"
        "from flyte_ddp.engine.arithmetic import settle_arithmetic; settle_arithmetic()\n"
        "print(may_round_to_tf32(), torch.backends.cudnn.rnn.fp32_precision)\n"
        "torch.backends.fp32_precision = 'tf32'\n"  # as a recipe may ask for
        "print(may_round_to_tf32(), torch.backends.cudnn.rnn.fp32_precision)\n"
    )
    shown = subprocess.run([sys.executable, "-c", program], cwd=ROOT, check=True, stdout=subprocess.PIPE).stdout
    flags = ["True", "True", "False", "False", "False", "True", "True"]
    assert shown.decode().split() == [*flags, "False", "none", "True", "tf32"]


def test_trees_are_taken_apart_and_put_together():
    tree = {"b": (torch.ones(2), [torch.zeros(3)]), "a": torch.ones(4)}
    leaves, structure = pytree.tree_flatten(tree)
    assert [len(leaf) for leaf in leaves] == [len(leaf) for leaf in pytree.tree_leaves(tree)] == [2, 3, 4]
    assert pytree.tree_unflatten([1, 2, 3], structure) == {"b": (1, [2]), "a": 3}
    assert pytree.tree_map(lambda one, other: len(one) + len(other), tree, tree) == {"b": (4, [6]), "a": 8}
    (path, _), *_ = pytree.tree_flatten_with_path(tree)[0]
    assert pytree.keystr(path) == "['b'][0]"


def test_of_what_is_compiled_the_network_itself_is_found():
    network = nn.Linear(2, 2)
    assert uncompiled(torch.compile(network)) is uncompiled(network) is network


def test_a_dispatch_mode_sees_the_operations_within_a_layer_by_their_arguments():
    seen = {}

    class Seeing(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            seen[func.name()] = torch_compat.name_arguments(func, args, kwargs or {})
            return func(*args, **(kwargs or {}))

    with Seeing():
        nn.RNN(2, 2, num_layers=2, dropout=0.5)(torch.ones(3, 1, 2))
    found = seen["aten::bernoulli_.float"]
    assert found.pop("self").shape == (3, 1, 2)
    assert found == {"p": 0.5, "generator": None}  # the last of which nobody gave


def test_a_copy_of_a_network_has_what_a_layer_has_computed_from_its_weights():
    """Which deepcopy refuses; see that once it no longer does, this is not needed."""
    layer = nn.utils.weight_norm(nn.Linear(2, 3))
    with pytest.raises(RuntimeError, match="deepcopy"):
        copy.deepcopy(layer)
    copied: Any = torch_compat.copy_network(layer, [layer.bias])
    assert copied.bias is layer.bias
    assert torch.equal(copied.weight, layer.weight)
    with torch.no_grad():
        copied.weight_g.mul_(2)
    for computes in (copied, layer):
        computes(torch.ones(1, 2))
    assert torch.equal(copied.weight, 2 * layer.weight)


def test_a_copy_of_a_network_has_the_hooks_on_its_gradients():
    layer = nn.Linear(1, 1)
    layer.weight.register_hook(lambda gradient: gradient + 1)
    layer.bias.register_post_accumulate_grad_hook(add_two)
    copied: Any = torch_compat.copy_with_hooks(layer)
    copied(torch.ones(1)).backward()
    assert (copied.weight.grad.item(), copied.bias.grad.item(), layer.weight.grad) == (2, 3, None)


def add_two(parameter):
    parameter.grad += 2


def test_operations_are_counted_in_total_though_a_leaf_goes_into_a_layer():
    layer, leaf = nn.Linear(2, 3), torch.ones(5, 2, requires_grad=True)
    with torch_compat.count_in_total(FlopCounterMode(display=False)) as counter:
        torch.autograd.grad(layer(leaf).sum(), leaf)
    assert counter.get_total_flops() == 2 * (2 * 5 * 2 * 3)  # forward, and backward to the leaf alone


@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW, torch.optim.Adagrad])
def test_a_fused_optimizer_heeds_flag_and_divisor_and_another_says_that_it_does_not(kind):
    weight, flag, divisor = nn.Parameter(torch.ones(3)), torch.zeros(()), torch.tensor(4.0)
    weight.grad = torch.full((3,), 2.0)
    fused = kind([weight], lr=0.1, fused=True)
    if kind is torch.optim.Adagrad and torch.__version__ < "2.15":
        pytest.skip("Adagrad heeds them in a newer torch")
    assert torch_compat.guard_steps(fused, flag, divisor)
    fused.step()
    assert weight.max() < 1
    assert weight.grad.tolist() == [0.5] * 3  # who looks at gradients after a step sees what it has used
    divisor.fill_(torch.inf)
    fused.step()
    assert weight.grad.tolist() == [0] * 3
    before = weight.detach().clone()
    flag.fill_(1)
    fused.step()
    assert torch.equal(weight, before)
    assert not torch_compat.guard_steps(kind([weight], lr=0.1, fused=False), flag, divisor)


def test_many_tensors_are_measured_and_changed_in_one_call():
    tensors, targets = [torch.tensor([3.0, 4.0]), torch.full((2, 2), 2.0)], [torch.zeros(2), torch.zeros(2, 2)]
    assert torch_compat.norms(tensors).tolist() == [5, 4]
    torch_compat.scale(tensors, torch.tensor(2.0))
    assert torch_compat.norms(tensors).tolist() == [10, 8]
    torch_compat.move_towards(tensors, targets, 0.25)
    assert torch_compat.norms(tensors).tolist() == [7.5, 6]
    torch_compat.copy(tensors, targets)
    assert torch_compat.norms(tensors).tolist() == torch_compat.norms(targets).tolist()


def test_batch_norm_of_one_row_reaches_the_operator_in_a_block():
    layer, row = nn.BatchNorm1d(3), torch.ones(1, 3)
    with pytest.raises(ValueError, match="more than 1 value per channel"):
        layer(row)
    with torch_compat.any_batch_size(), pytest.raises(ValueError, match="more than 1 spatial element"):
        nn.InstanceNorm1d(3)(torch.ones(1, 3, 1))  # checked elsewhere
    with torch_compat.any_batch_size():
        assert torch.equal(layer(row), torch.zeros(1, 3))
    assert torch_compat.is_batch_norm(layer)
    assert not torch_compat.is_batch_norm(nn.InstanceNorm1d(3))


def test_a_call_after_backward_comes_before_ddp_waits_for_the_other_ranks(tmp_path):
    """DDP puts what the ranks have exchanged in place of a gradient once it has waited for it."""
    distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        layer = nn.Linear(3, 1, bias=False)
        parallel = DistributedDataParallel(layer)
        parallel.register_comm_hook(None, exchange)
        seen = []
        for _ in range(2):
            layer.zero_grad(set_to_none=False)
            loss = parallel(torch.ones(1, 3)).sum()
            torch_compat.after_backward(loss, lambda: seen.append(gradient_of(layer)))
            loss.backward()
        assert gradient_of(layer) == [[2, 2, 2]]
        assert seen == [[[1, 1, 1]]] * 2
    finally:
        distributed.destroy_process_group()


def test_buckets_are_arranged_once_with_the_last_layers_first(tmp_path):
    distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        sent: dict[type, list[list[list[torch.Size]]]] = {}  # by step and bucket
        for kind in (DistributedDataParallel, torch_compat.SettledBuckets):
            layers = [nn.Linear(500 + size, 500 + size + 1) for size in range(4)]
            parallel, steps = kind(nn.Sequential(*layers), bucket_cap_mb=2), sent.setdefault(kind, [])

            def record(steps, bucket):
                steps[-1].append(sorted(parameter.shape for parameter in bucket.parameters()))
                future: Any = torch.futures.Future()
                future.set_result(bucket.buffer())
                return future

            parallel.register_comm_hook(steps, record)
            for _ in range(2):
                steps.append([])
                parallel(torch.ones(1, 500)).sum().backward()
            assert [name for name, _ in parallel.module.named_modules()] == ["", *"0123"]
        (first, later), (settled, still) = sent.values()
        assert first != later
        assert settled == still
        assert (504, 503) in settled[0]
        assert (501, 500) in settled[-1]
    finally:
        distributed.destroy_process_group()


def gradient_of(layer: nn.Linear) -> Any:
    return layer.weight.grad.tolist()  # type: ignore[union-attr]


def exchange(_, bucket):  # torch insists on annotations of its own, or none
    done: torch.futures.Future[torch.Tensor] = torch.futures.Future()
    done.set_result(2 * bucket.buffer())
    return done


COMPILER = """if True:
    import sys, torch
    from torch import distributed, nn
    from torch.nn.parallel import DistributedDataParallel
    from flyte_ddp.engine.compiler_compat import defer_dynamo_import
    defer_dynamo_import()
    distributed.init_process_group("gloo", init_method="file://" + sys.argv[1], rank=0, world_size=1)
    model = DistributedDataParallel(nn.Linear(2, 2))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    model(torch.ones(2)).sum().backward()
    optimizer.step()
    distributed.destroy_process_group()
    print([name for name in sys.modules if name.startswith(("torch._dynamo", "torch._inductor"))])
"""


def test_neither_ddp_nor_optimizers_bring_the_compiler(tmp_path):
    command = [sys.executable, "-c", COMPILER, str(tmp_path / "store")]
    done = subprocess.run(
        command, cwd=ROOT, env={**os.environ, "PYTHONPATH": str(ROOT)}, capture_output=True, text=True, timeout=300
    )
    assert done.stdout == "['torch._dynamo', 'torch._dynamo.utils', 'torch._dynamo.config']\n", done.stderr


def test_weights_can_be_gathered_in_their_own_types_before_and_after_the_first_use(tmp_path):
    fsdp = pytest.importorskip("torch.distributed.fsdp")
    if not hasattr(fsdp.FSDPModule, "set_reduce_scatter_unused_params"):
        pytest.skip("sharding needs a newer torch")
    distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/rendezvous", rank=0, world_size=1)
    policy = fsdp.MixedPrecisionPolicy(torch.bfloat16, cast_forward_inputs=False)
    mesh = distributed.device_mesh.init_device_mesh("cpu", (1,))
    layer = fsdp.fully_shard(nn.Linear(2, 2), mesh=mesh, reshard_after_forward=True, mp_policy=policy)
    features = torch.ones(1, 2)
    try:
        for _ in range(2):
            with torch_compat.gather_in_own_dtype([layer]):
                assert layer(features).dtype == torch.float32
            layer(features.bfloat16()).sum().backward()
            assert layer.weight.grad.dtype == torch.float32
    finally:
        distributed.destroy_process_group()


class Doubled(nn.Module):
    """Gives its unit an input twice, and that sees that it is one."""

    def __init__(self, is_outer=True):
        super().__init__()
        self.used, self.unused = nn.Linear(2, 2), nn.Linear(2, 2)
        self.unit: Any = Doubled(False) if is_outer else None

    def forward(self, one, other):
        assert one is other
        hidden = self.used(one) * other
        return self.unit(hidden, hidden) if self.unit else hidden


def test_a_sharded_unit_tells_of_its_gradients_and_leaves_the_graph_as_it_is(tmp_path):
    fsdp = pytest.importorskip("torch.distributed.fsdp")
    distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/rendezvous", rank=0, world_size=1)
    mesh = distributed.device_mesh.init_device_mesh("cpu", (1,))
    called: list[int] = []
    reduced: list[bool] = []
    try:
        network = Doubled()
        for unit in (network.unit, network):
            unit.unused.bias.requires_grad_(False)
            fsdp.fully_shard(unit, mesh=mesh, reshard_after_forward=True)
            torch_compat.use_backward_hooks(unit)
        unit = network.unit
        features = torch.ones(1, 2, requires_grad=True)
        network(features, features)  # now torch knows which module is the outermost
        trained = unit.used.weight, unit.used.bias, unit.unused.weight
        assert [*map(id, torch_compat.trained_weights(unit))] == [*map(id, trained)]
        torch_compat.hook_whole_gradients(unit, called.append)
        features.register_hook(lambda _: reduced.append(unit.used.weight.grad is not None))
        for _ in range(2):
            network(features, features).sum().backward()
            network.zero_grad()
        assert sorted(called) == [0, 0, 1, 1]
        assert reduced == [True, True]
    finally:
        distributed.destroy_process_group()


def test_the_version_of_a_tensor_grows_with_each_change_in_place():
    weight = nn.Parameter(torch.zeros(2))
    before = torch_compat.version(weight)
    with torch.no_grad():
        weight.add_(1)
    assert torch_compat.version(weight) > before


def test_tensors_are_broadcast_together(tmp_path):
    """Whatever their types; what a rank gets is seen by tests of virtual ranks."""
    distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/rendezvous", rank=0, world_size=1)
    try:
        sent = [torch.arange(6, dtype=torch.uint8), torch.ones(3)]
        torch_compat.broadcast_together(sent)
        assert [tensor.sum().item() for tensor in sent] == [15, 3]
    finally:
        distributed.destroy_process_group()
