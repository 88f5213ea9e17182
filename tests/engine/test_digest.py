"""The digest of weights: equal for equal bits, however they are stored or cut, and another for any others."""

import math
from itertools import pairwise

import pytest
import torch
from torch import nn

from flyte_ddp.engine.digest import KEYS, compute_sum, sum_of_all, weights_digest
from flyte_ddp.model_files.model_metadata import read_metadata

MODULUS = 1 << 64
WIDE = (torch.float32, torch.int64, torch.float64, torch.complex64, torch.complex128)


def test_parts_add_up_wherever_they_are_cut():
    few = torch.randn(2 * KEYS + 1)
    for numbers in (torch.randn(3 * KEYS + 100), few.bfloat16(), few.double(), few * 1j, torch.arange(5) > 2):
        whole, count = int(compute_sum(numbers)), len(numbers)
        for cuts in ((1,), (KEYS,), (KEYS - 1, KEYS + 1), (3, 2 * KEYS), range(0, count, 1 + count // 7)):
            edges = [0, *(cut for cut in cuts if 0 < cut < count), count]
            parts = [int(compute_sum(numbers[first:last], first)) for first, last in pairwise(edges)]
            assert (sum(parts) - whole) % MODULUS == 0


def test_any_change_is_another_digest():
    weight = torch.zeros(4, 2 * KEYS)
    found = {weights_digest({"a": weight})}

    def differs(weights):
        digest = weights_digest(weights)
        assert len(digest) == 16
        assert int(digest, 16) >= 0
        assert digest not in found
        found.add(digest)

    for row, column in ((0, 0), (0, 1), (0, KEYS), (3, 2 * KEYS - 1)):
        for value in (1.0, -0.0, 1e-45, math.nan):
            changed = weight.clone()
            changed[row, column] = value
            differs({"a": changed})
    for corners in (((0, 1), (0, 4)), ((0, 2), (0, 3)), ((0, KEYS), (1, KEYS)), ((0, 0), (2, 0))):  # sums of positions
        changed = weight.clone()
        for corner in corners:
            changed[corner] = 1
        differs({"a": changed})
    differs({"a": weight.view(2, -1)})
    differs({"a": weight.half()})
    differs({"a": weight.int()})
    differs({"b": weight})
    differs({"a": weight, "b": weight})
    differs({"b": weight, "a": weight})
    differs({"a": weight, "b": torch.zeros(())})
    differs({"a": weight, "b": torch.zeros(0)})
    differs({})
    assert weights_digest({"a": weight}, "of a base") not in found


def test_strides_do_not_count_and_all_dtypes_do():
    image = torch.randn(8, 3, 5, 5)
    assert weights_digest({"a": image}) == weights_digest({"a": image.to(memory_format=torch.channels_last)})
    assert weights_digest({"a": image[:, 1]}) == weights_digest({"a": image[:, 1].clone()})


@pytest.mark.parametrize("dtype", [torch.bool, torch.int8, torch.bfloat16, *WIDE], ids=str)
def test_each_bit_counts(dtype):
    bits = torch.ones(3, dtype=dtype).view(torch.uint8)
    found = {weights_digest({"a": bits.view(dtype)})}
    for bit in range(8 * len(bits)):
        changed = bits.clone()
        changed[bit // 8] ^= 1 << bit % 8
        found.add(weights_digest({"a": changed.view(dtype)}))
    assert len(found) == 1 + 8 * len(bits)


def test_so_does_the_order_of_rows_whose_sums_are_equal():
    identity = torch.eye(512)
    each = KEYS // 512  # rows after which the keys begin again
    assert len({weights_digest({"a": identity.roll(by, 0)}) for by in (0, 1, each, 2 * each)}) == 4


def test_so_does_the_order_of_tensors():
    one, other = torch.ones(3), torch.zeros(3)
    assert sum_of_all([one, other], one.device) != sum_of_all([other, one], one.device)


def test_it_is_the_same_number_on_any_processor_and_in_any_version():
    weight = torch.arange(3 * KEYS, dtype=torch.float32).view(3, -1) / 7
    weights = {"a": weight, "b": weight.bfloat16(), "c": torch.tensor(5)}
    assert weights_digest(weights, "base") == "89bd5d3dfea437f0"


def test_tied_weights_are_those_of_their_file(tmp_path):
    network = nn.ModuleDict({"first": nn.Linear(3, 3), "second": nn.Linear(3, 3)})
    network["second"].weight = network["first"].weight
    torch.save(network.state_dict(), tmp_path / "model.pt")
    read = torch.load(tmp_path / "model.pt")
    untied = {name: value.clone() for name, value in read.items()}
    assert weights_digest(network.state_dict()) == weights_digest(read) == weights_digest(untied)


def test_a_training_tells_those_of_each_evaluation_and_of_its_model(whole):
    trained = whole(2, epochs=2, validation_fraction=0.2)
    result = trained.result
    known = read_metadata(trained.folder / "model.pt")
    assert known
    assert result.digest == weights_digest(trained.weights) == known.weights_digest
    digests = [epoch.digest for epoch in result.epochs]
    assert len({*digests}) == 2
    assert result.digest == digests[result.chosen_epoch]
    assert weights_digest(torch.load(trained.folder / "last.pt")) == digests[-1]


def test_a_conjugate_has_the_sum_of_its_values():
    numbers = torch.randn(10, dtype=torch.complex64)
    assert torch.equal(compute_sum(numbers.conj()), compute_sum(numbers.conj().resolve_conj()))
    assert torch.equal(compute_sum(numbers.conj().imag), compute_sum(numbers.conj().resolve_conj().imag))
