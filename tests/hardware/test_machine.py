"""What nvidia-smi prints is read or refused, and what stands in the way of a training is said."""

import dataclasses
import math
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from flyte_ddp.hardware import machine as machine_module
from flyte_ddp.hardware import nvidia
from flyte_ddp.hardware.capabilities import Capabilities, Plan, TorchGpu
from flyte_ddp.hardware.machine import GIB, Machine, known, warnings
from flyte_ddp.hardware.nvidia import DriverGpu, NotKnown, pairs, parse_cuda, parse_gpus, parse_links
from flyte_ddp.hardware.page import as_page, as_text
from flyte_ddp.launch.environment import World
from flyte_ddp.recipes.hyperparameters import Hyperparameters
from flyte_ddp.settings import RunOptions

GARBAGE = [
    "",
    "\n\n",
    "Segmentation fault",
    "\x1b[4m\x00\x1b[0m",
    "GPU0\tGPU1\n",
    "GPU0 X NV4\n",
    "0, a, b\n",
    "\t,,,,,\n",
]

H100 = "NVIDIA H100 80GB HBM3"
MATRIX = (
    "\t\x1b[4mGPU0\tGPU1\tGPU2\tNIC0\tCPU Affinity\tNUMA Affinity\tGPU NUMA ID\x1b[0m\n"
    "GPU0\t X \tNV12\tSYS\tPXB\t0-31,64-95\t0\t\tN/A\n"
    "GPU1\tNV12\t X \tSYS\tSYS\t0-31,64-95\t0\t\tN/A\n"
    "GPU2\tSYS\tSYS\t X \tSYS\t32-63\t1\t\tN/A\n"
    "NIC0\tPXB\tSYS\tSYS\t X \t\t\t\t\n\n"
    "Legend:\n\n  X    = Self\n  NV#  = Connection traversing a bonded set of # NVLinks\n\n"
    "NIC Legend:\n\n  NIC0: mlx5_0\n"
)


def test_the_drivers_list_is_read_with_what_it_does_not_know():
    gpus = parse_gpus(
        "0, Tesla T4, 15360, 2, [N/A], 535.183.01\n"
        "1, NVIDIA A100-SXM4-80GB, 81920, [Unknown Error], Enabled, 535.183.01\n"
    )
    assert [(gpu.name, gpu.used_mib, gpu.mig) for gpu in gpus] == [
        ("Tesla T4", "2", "[N/A]"),
        ("NVIDIA A100-SXM4-80GB", "[Unknown Error]", "Enabled"),
    ]
    assert parse_gpus("") == []


@pytest.mark.parametrize("head", ["CUDA Version: 12.4     |", "CUDA UMD Version: 12.4  |"])
def test_the_drivers_cuda_is_read(head):
    assert parse_cuda(f"| NVIDIA-SMI 550.54.15    Driver Version: 550.54.15    {head}\n") == "12.4"


def test_the_matrix_is_read_without_network_cards_and_escapes():
    links = parse_links(MATRIX)
    assert links == {"GPU0": ["X", "NV12", "SYS"], "GPU1": ["NV12", "X", "SYS"], "GPU2": ["SYS", "SYS", "X"]}
    assert pairs(links) == ["NV12", "SYS", "SYS"]
    alone = parse_links("\tGPU0\tCPU Affinity\tNUMA Affinity\tGPU NUMA ID\nGPU0\t X \t0-15\t0\t\tN/A\n")
    assert alone == {"GPU0": ["X"]}
    assert pairs(alone) == []


@pytest.mark.parametrize("text", GARBAGE)
def test_garbage_is_not_known(text):
    for parse in (parse_links, parse_cuda, *([parse_gpus] if text.strip() else [])):
        assert str(known(partial(parse, text))).startswith("not known: nvidia-smi ")


@pytest.mark.parametrize(
    ("program", "reason"),
    [
        (None, "there is no nvidia-smi here"),
        ("echo; echo NVIDIA-SMI has failed; exit 9", "NVIDIA-SMI has failed"),
        ("exit 3", "nvidia-smi ended with status 3"),
        ("exec sleep 60", "nvidia-smi gave no answer within 0.2 s"),
    ],
)
def test_an_nvidia_smi_that_fails_is_not_known(tmp_path, monkeypatch, program, reason):
    if program:
        file = tmp_path / "nvidia-smi"
        file.write_text(f"#!/bin/sh\n{program}\n")
        file.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin" if program else str(tmp_path))
    monkeypatch.setattr(nvidia, "SECONDS", 0.2 if program and "sleep" in program else 30)
    assert str(known(nvidia.ask)) == f"not known: {reason}"


def test_a_torch_that_fails_is_not_known(monkeypatch):
    monkeypatch.setattr(machine_module, "SURVEY", "os:abort")  # which takes no arguments
    found = known(lambda: machine_module.ask_torch(Hyperparameters(), RunOptions()))
    assert str(found).startswith("not known: torch ended with TypeError: ")


def capabilities(number: int, precision: str = "bfloat16", **changes: Any) -> Capabilities:
    world = World(number or 2, number or 2, "nccl" if number else "gloo", "cuda" if number else "cpu")
    found = Capabilities(
        torch="2.9.0+cu128",
        cuda="12.8",
        nccl="2.27.5",
        gpus=[TorchGpu(H100, 80 * GIB, "9.0")] * number,
        no_gpu="" if number else "Found no NVIDIA driver on your system.",
        complaints=[],
        peers=(number * (number - 1) // 2,) * 2,
        cpu_bfloat16=["amx_bf16"],
        plan=Plan(world, 8, precision),
        refusal="",
    )
    return dataclasses.replace(found, **changes)


def machine(number: int = 8, **changes: Any) -> Machine:
    """One where nothing is wrong."""
    found = Machine(
        gpus=[
            DriverGpu(str(index), "NVIDIA H100 80GB HBM3", "81559", "4", "Disabled", "570.86")
            for index in range(number)
        ],
        cuda="12.8",
        links=parse_links(MATRIX),
        torch=capabilities(number),
        devices=number,
        visible=None,
        ports=["400 Gb/sec (4X NDR), 4: ACTIVE"] * number,
        nccl={},
        processor="Intel(R) Xeon(R) Platinum 8480C",
        cores=(112, 112),
        cpu_limit=math.inf,
        memory=(2000 * GIB, 2000 * GIB),
        shared_memory=(1000 * GIB, 1000 * GIB),
    )
    return dataclasses.replace(found, **changes)


@pytest.mark.parametrize("gpus", [0, 1, 8])
def test_where_nothing_is_wrong_there_is_no_warning(gpus):
    assert warnings(machine(gpus)) == []


MIG = [DriverGpu("0", "NVIDIA A100", "40960", "0", "Enabled", "570.86")]
UNEQUAL = [TorchGpu("NVIDIA A100", 40 * GIB, "8.0"), TorchGpu(H100, 80 * GIB, "9.0")]
OLD = capabilities(0, no_gpu="The NVIDIA driver on your system is too old (found version 11040).\nPlease update")
REFUSED = capabilities(0, plan=None, refusal="nproc must be at most 1")


@pytest.mark.parametrize(
    ("found", "words"),
    [
        (machine(shared_memory=(2**26, 2**26)), "/dev/shm has 0.06 GiB free"),
        (machine(0, cores=(1, 64), cpu_limit=1.5), "1.5 of the machine's 64 cores"),
        (machine(0, cores=(1, 1)), "2 ranks share 1 core:"),
        (machine(memory=(8 * GIB, 64 * GIB)), "8.00 GiB of memory is less than 8 ranks need (32 GiB)"),
        (machine(torch=capabilities(8, "float32")), "float32"),
        (machine(visible="0,1", torch=capabilities(2)), 'torch uses 2 of 8 GPUs, and CUDA_VISIBLE_DEVICES is "0,1"'),
        (machine(torch=capabilities(7)), "torch uses 7 of the 8 GPUs"),
        (machine(torch=OLD), "driver on your system is too old (found version 11040)."),
        (machine(gpus=NotKnown("there is no nvidia-smi here"), torch=OLD), "is too old"),
        (machine(1, gpus=MIG), "MIG divides GPU 0"),
        (machine(2, torch=capabilities(2, gpus=UNEQUAL)), "the slowest sets the pace"),
        (
            machine(1, torch=capabilities(1, complaints=["\nsm_120 is not compatible\nmore"])),
            "sm_120 is not compatible",
        ),
        (machine(0, torch=REFUSED), "refused: nproc must be at most 1"),
        (machine(torch=NotKnown("torch ended with SIGSEGV")), "not known: torch ended with SIGSEGV"),
    ],
)
def test_each_thing_in_the_way_is_said_once_everywhere(found, words):
    (warning,) = [text for text in warnings(found) if words in text]
    assert warning in as_text("host", found)
    assert "<h1>Hardware</h1>" in as_page("host", found)


def test_a_node_with_eight_gpus_as_text():
    text = as_text("node-1", machine())
    for line in (
        "Ranks                  8 with nccl, on cuda",
        "570.86, runs CUDA up to 12.8",
        "8 x NVIDIA H100 80GB HBM3, 81559 MiB",
        "8 x NVIDIA H100 80GB HBM3, 80 GiB, compute capability 9.0",
        "1 x NV12, 2 x SYS (pairs;",
        "28 of 28 pairs",
        "8 x 400 Gb/sec (4X NDR), 4: ACTIVE",
        "  GPU1   NV12   X      SYS\n",
    ):
        assert line in text


def test_nothing_known_is_said_and_shown():
    nothing = NotKnown("a <b>reason</b>")
    found = machine(gpus=nothing, cuda=nothing, links=nothing, torch=nothing, ports=nothing, memory=nothing)
    assert as_text("host", found).count("not known: a <b>reason</b>") >= 6
    assert "a &lt;b&gt;reason" in as_page("<i>host</i>", found)
    assert "<b>reason" not in as_page("<i>host</i>", found)


def test_a_missing_folder_is_not_known(tmp_path):
    assert str(known(lambda: Path(tmp_path, "none").read_text())).startswith("not known: [Errno 2]")
