"""What NVIDIA's driver says is told or refused, and what stands in the way of a training is said."""

import dataclasses
import json
import math
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from flyte_ddp.engine.set_up import choose_precision
from flyte_ddp.hardware.capabilities import Capabilities
from flyte_ddp.hardware.machine import Machine, known, warnings
from flyte_ddp.hardware.nvidia import DriverGpu, UnknownError
from flyte_ddp.hardware.page import as_page, as_text
from flyte_ddp.launch.environment import World, nvidia_devices
from flyte_ddp.text import GIB
from tests.nvml import stand_in

ROOT = Path(__file__).parents[2]

H100 = "NVIDIA H100 80GB HBM3"
TOPOLOGY = "\tGPU0\tGPU1\nGPU0\t X \tNV12\nGPU1\tNV12\t X \n\nLegend:\n\n  NV#  = Connection traversing # NVLinks"

ASK = """if True:
    import json, sys
    from dataclasses import astuple
    from flyte_ddp.hardware import nvidia
    from flyte_ddp.hardware.machine import known
    nvidia.SECONDS = float(sys.argv[1])
    gpus = known(lambda: nvidia.answer(nvidia.gpus))
    found = gpus if isinstance(gpus, nvidia.UnknownError) else [astuple(gpu) for gpu in gpus]
    others = (known(lambda question=question: nvidia.answer(question)) for question in (nvidia.cuda, nvidia.topology))
    print(json.dumps([found, *others], default=str))
"""


def asked(environment: dict[str, str], seconds: float = 30) -> Any:
    """What a process of that environment is told of GPUs, CUDA and topology."""
    command = [sys.executable, "-c", ASK, str(seconds)]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_the_driver_tells_with_what_it_does_not_know(tmp_path):
    smi = tmp_path / "nvidia-smi"
    smi.write_text(f'#!/bin/sh\necho "$*"\ncat <<END\n\033[4m{TOPOLOGY}\033[0m\nEND\n')
    smi.chmod(0o755)
    path = f"{tmp_path}{os.pathsep}{os.environ['PATH']}"
    gpus, cuda, topology = asked(stand_in(tmp_path, NVML_GPUS="8", NVML_MIG="-2", NVML_DENIED="3", PATH=path))
    assert gpus[0] == ["0", H100, "81559", "4", "Disabled", "570.86"]
    assert [gpu[0] for gpu in gpus] == ["0", "1", "2", "4", "5", "6", "7"], "the fourth belongs to another container"
    assert [gpu[4] for gpu in gpus[1:3]] == ["Enabled", "[Not Supported]"]
    assert gpus[6][1:4] == [H100, "[GPU is lost]", "[GPU is lost]"]
    assert cuda == "12.8"
    assert topology == f"topo -m\n{TOPOLOGY}".expandtabs()


@pytest.mark.parametrize(
    ("variables", "seconds", "reason"),
    [
        ({"LD_LIBRARY_PATH": ""}, 30, "there is no NVIDIA driver here (libnvidia-ml.so.1 cannot be loaded)"),
        ({"NVML_INIT": "9"}, 30, "NVIDIA's driver says: Driver Not Loaded"),
        ({"NVML_INIT": "18"}, 30, "NVIDIA's driver says: RM has detected an NVML/RM version mismatch."),
        ({"NVML_INIT": "hang"}, 0.2, "NVIDIA's driver gave no answer within 0.2 s"),
    ],
)
def test_a_driver_that_fails_is_not_known(tmp_path, variables, seconds, reason):
    if "LD_LIBRARY_PATH" in variables and nvidia_devices():
        pytest.skip("there is a driver here")
    assert asked({**stand_in(tmp_path, NVML_GPUS="8"), **variables}, seconds) == [f"not known: {reason}"] * 3


def test_a_torch_that_fails_is_not_known(tmp_path):
    (tmp_path / "torch.py").write_text("raise ImportError('libcudart.so.12 is missing')")
    program = """if True:
        from flyte_ddp.hardware.machine import ask_torch, known
        from flyte_ddp.recipes.hyperparameters import Hyperparameters
        from flyte_ddp.settings import RunOptions
        if __name__ == "__main__":
            print(known(lambda: ask_torch(Hyperparameters(), RunOptions())))
    """
    environment = {**os.environ, "PYTHONPATH": f"{tmp_path}:{ROOT}"}
    done = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True, timeout=120)
    assert done.stdout == "not known: torch ended with ImportError: libcudart.so.12 is missing\n", done.stderr


def capabilities(number: int, precision: str = "bfloat16", **changes: Any) -> Capabilities:
    world = World(number or 2, number or 2, "nccl" if number else "gloo", "cuda" if number else "cpu")
    found = Capabilities(
        torch="2.9.0+cu128",
        cuda="12.8",
        nccl="2.27.5",
        gpus=[f"{H100}, 80 GiB, compute capability 9.0"] * number,
        no_gpu="" if number else "Found no NVIDIA driver on your system.",
        complaints=[],
        peers="{0} of {0} pairs".format(number * (number - 1) // 2),
        cpu_bfloat16=["amx_bf16"],
        world=world,
        precision=precision,
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
        topology=TOPOLOGY,
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
UNEQUAL = ["NVIDIA A100, 40 GiB, compute capability 8.0", f"{H100}, 80 GiB, compute capability 9.0"]
OLD = capabilities(0, no_gpu="The NVIDIA driver on your system is too old (found version 11040).\nPlease update")
REFUSED = capabilities(0, world=None, refusal="nproc must be at most 1")


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
        (machine(gpus=UnknownError("there is no driver here"), torch=OLD), "is too old"),
        (machine(1, gpus=MIG), "MIG partitions GPU 0"),
        (machine(2, torch=capabilities(2, gpus=UNEQUAL)), "the slowest sets the pace"),
        (
            machine(1, torch=capabilities(1, complaints=["\nsm_120 is not compatible\nmore"])),
            "sm_120 is not compatible",
        ),
        (machine(0, torch=REFUSED), "refused: nproc must be at most 1"),
        (machine(torch=UnknownError("torch ended with SIGSEGV")), "not known: torch ended with SIGSEGV"),
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
        "28 of 28 pairs",
        "8 x 400 Gb/sec (4X NDR), 4: ACTIVE",
        f"nvidia-smi topo -m\n{TOPOLOGY}\n",
    ):
        assert line in text
    assert f"<pre>\n{TOPOLOGY}</pre>" in as_page("node-1", machine())


def test_nothing_known_is_said_and_shown():
    nothing = UnknownError("a <b>reason</b>")
    found = machine(gpus=nothing, cuda=nothing, topology=nothing, torch=nothing, ports=nothing, memory=nothing)
    assert as_text("host", found).count("not known: a <b>reason</b>") >= 6
    assert "a &lt;b&gt;reason" in as_page("<i>host</i>", found)
    assert "<b>reason" not in as_page("<i>host</i>", found)


def test_a_missing_folder_is_not_known(tmp_path):
    assert str(known(lambda: Path(tmp_path, "none").read_text())).startswith("not known: [Errno 2]")


@pytest.mark.parametrize(
    ("kernels", "instruction", "expected"),
    [("AVX512", "avx512_bf16", "bfloat16"), ("AVX512", "sse4_2", "float32"), ("AVX2", "amx_bf16", "float32")],
)
def test_precision_auto_is_bfloat16_only_where_torch_uses_the_instructions_for_it(
    kernels, instruction, expected, monkeypatch
):
    monkeypatch.setattr("torch.backends.cpu.get_cpu_capability", lambda: kernels)
    monkeypatch.setattr("torch.cpu.get_capabilities", lambda: {instruction: True})
    assert choose_precision("auto", torch.device("cpu")) == expected
    assert choose_precision("bfloat16", torch.device("cpu")) == "bfloat16"
