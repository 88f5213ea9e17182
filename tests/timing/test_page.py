"""The timing study says what the figures show and nothing else."""

import pytest

from flyte_ddp.timing.measurement import DATA_PARALLEL, ONE_DEVICE, PROCESSES, Measurement
from flyte_ddp.timing.page import explain, spreads

THREADS = {ONE_DEVICE: 2, DATA_PARALLEL: 2, PROCESSES: 1}


def said(one, parallel, processes, gpus=0, count=2):
    """Text about methods that are given as {batch size: images per second of each repeat}."""
    lines = ((ONE_DEVICE, 1, one), (DATA_PARALLEL, gpus or 1, parallel), (PROCESSES, count, processes))
    found = [
        Measurement(method, devices, THREADS[method], size, rate)
        for method, devices, line in lines
        for size, rates in line.items()
        for rate in rates
    ]
    return " ".join(explain(spreads(found), gpus, count, THREADS))


ONE = {1: [900, 1000, 1100], 64: [4000, 4100, 4200]}


@pytest.mark.parametrize(
    ("processes", "says", "never"),
    [
        ({1: [1800, 1900, 2000], 64: [4100, 4200, 4300]}, "With 1 images a batch processes are faster", "are slower"),
        ({1: [1800, 1900, 2000], 64: [4100, 4200, 4300]}, "With 64 the ranges overlap", "than the cores can give"),
        ({1: [1000, 1050, 1070], 64: [3000, 3100, 3200]}, "With 64 images a batch they are slower", "are faster"),
        (
            {1: [3000, 3100, 3200], 64: [4100, 4200, 4300]},
            "More than 2 times is more than the cores",
            "are slower",
        ),
    ],
)
def test_processes_on_a_cpu(processes, says, never):
    text = said(ONE, ONE, processes)
    assert says in text
    assert never not in text


def test_data_parallel_without_a_gpu_is_the_network_itself():
    text = said(ONE, ONE, ONE)
    assert "no GPU here, so nn.DataParallel runs the network itself" in text
    assert "overlap with every batch size" in text
    noisy = said(ONE, {**ONE, 64: [3000, 3100, 3200]}, ONE)
    assert "differ with 64 images a batch, because this machine is noisy" in noisy


def test_data_parallel_on_gpus_is_told_by_what_it_adds_to_a_batch():
    text = said(ONE, {1: [500, 500, 500], 64: [8000, 8200, 8400]}, {1: [3900] * 3, 64: [16000] * 3}, gpus=4, count=4)
    assert "4 GPUs reach from 0.50 times (with 1 images a batch) to 2.00 times (with 64)" in text
    assert "adds 7 ms to a batch" in text, "4 images at 500 a second, less one at 1000 a second"
    assert "4 processes reach from 3.90 times" in text


def test_larger_batches_are_called_faster_only_where_they_are():
    assert "an image takes 1 ms in batches of 1 and 0.244 ms in batches of 64" in said(ONE, ONE, ONE)
    flat = {1: [900, 1000, 1100], 64: [950, 1000, 1050]}
    assert "larger batches are no faster per image" in said(flat, flat, flat)
