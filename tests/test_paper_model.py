"""The arithmetic of the model on paper."""

import math
from dataclasses import replace

import pytest

from benchmarks.paper_measured import fit_links, fit_network
from benchmarks.paper_model import (
    GPUS,
    H100,
    MNIST,
    RESNET,
    Links,
    all_reduce,
    exposed,
    plot,
    step,
    strong,
    table,
    weak,
)

SLOW = Links(latency=1e-3, bandwidth=1e9)
NETWORKS = [MNIST, RESNET, replace(RESNET, data=0.01)]


@pytest.mark.parametrize("network", NETWORKS)
@pytest.mark.parametrize("links", [H100, SLOW])
@pytest.mark.parametrize("kind", [weak, strong])
def test_efficiency_begins_at_one_and_only_falls(network, links, kind):
    efficiencies = [kind(gpus, network, links)[1] for gpus in GPUS]
    assert efficiencies[0] == 1
    assert efficiencies == sorted(efficiencies, reverse=True)
    assert efficiencies[-1] > 0


def test_one_gpu_reduces_nothing_and_two_send_their_gradients_once():
    assert all_reduce(1, 1e9, SLOW) == 0
    assert all_reduce(2, 1e9, SLOW) == pytest.approx(1.001)
    assert all_reduce(4, 1e9, SLOW) == pytest.approx(1.501)
    in_a_node, across = (all_reduce(gpus, 1e9, H100) for gpus in (8, 16))
    assert in_a_node == pytest.approx(40e-6 + 1.75e9 / 480e9)
    assert across == pytest.approx(45.5e-6 + 1.875e9 / 350e9)


def test_only_what_outlasts_the_backward_pass_is_waited_for():
    early, late = (replace(RESNET, buckets=((10**9, ready),)) for ready in (0.0, 1.0))
    assert exposed(2, 0.5, late, SLOW) == pytest.approx(1.001)
    assert exposed(2, 0.5, early, SLOW) == pytest.approx(0.501)
    assert exposed(2, 5.0, early, SLOW) == 0
    assert exposed(1, 0.0, late, SLOW) == 0
    assert step(8, 256, RESNET, Links(0, math.inf)) == step(1, 256, RESNET, H100)


def test_a_slow_input_sets_the_pace():
    assert step(1, 100, replace(MNIST, data=1.0), H100) == 100


def test_constants_come_back_from_the_steps_that_they_make():
    batches = (32, 64)
    alone = [(step(1, batch, MNIST, SLOW),) for batch in batches]
    fitted = fit_network(batches, alone)
    assert (fitted.fixed, fitted.per_image) == pytest.approx((MNIST.fixed, MNIST.per_image))
    links = fit_links(H100, [(1e-4,), (1e-4 + (1_724_320 - 4096) / 2e9,)])
    assert (links.latency, links.bandwidth) == pytest.approx((1e-4, 2e9))


def test_table_and_plot_show_every_number_of_gpus(tmp_path):
    lines = table([MNIST, RESNET], H100).splitlines()
    assert [line.split(" | ")[0] for line in lines[2:]] == [f"| {gpus:,}" for gpus in GPUS]
    plot(tmp_path / "plot.svg", [MNIST, RESNET], H100)
    drawn = (tmp_path / "plot.svg").read_text()
    assert all(words in drawn for words in ("weak scaling", "strong scaling", "ResNet-50", "1,024"))
