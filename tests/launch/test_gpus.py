"""GPUs are counted as CUDA would, by the real pynvml over a stand-in for the driver's library, and without torch."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from flyte_ddp.launch.nvml import Gpu, count_cuda_devices
from tests.nvml import stand_in

ROOT = Path(__file__).parents[2]
COUNT = """if True:
    import sys
    from pathlib import Path
    from flyte_ddp.launch.environment import visible_gpus
    print(visible_gpus(Path(sys.argv[1])), "torch" in sys.modules, "pynvml" in sys.modules)
"""


@pytest.fixture
def devices(tmp_path):
    """A /dev of a machine with GPUs."""
    if not torch.version.cuda:
        pytest.skip("needs a torch that is built for CUDA")
    (tmp_path / "dev").mkdir()
    (tmp_path / "dev" / "nvidia0").touch()
    (tmp_path / "dev" / "nvidiactl").touch()
    return tmp_path / "dev"


def count(devices: Path, environment) -> str:
    command = [sys.executable, "-c", COUNT, str(devices)]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


@pytest.mark.parametrize(
    ("variables", "number"),
    [
        ({"NVML_GPUS": "8"}, 8),
        ({"NVML_GPUS": "8", "CUDA_VISIBLE_DEVICES": ""}, 0),
        ({"NVML_GPUS": "8", "CUDA_VISIBLE_DEVICES": "6,7,8"}, 2),
        ({"NVML_GPUS": "8", "NVML_DENIED": "3"}, 7),
        ({"NVML_GPUS": "1", "NVML_MIG": "3", "CUDA_VISIBLE_DEVICES": "MIG-0-2"}, 1),
    ],
)
def test_the_parent_counts_by_the_driver_without_torch(tmp_path, devices, variables, number):
    assert count(devices, stand_in(tmp_path / "library", **variables)) == f"{number} False True"


RANK = """if True:
    import sys
    from pathlib import Path
    from flyte_ddp.errors import InputError
    from flyte_ddp.launch import environment
    environment.visible_gpus.__defaults__ = (Path(sys.argv[1]),)
    try:
        print(environment.environment_from_variables("auto").world.backend)
    except InputError as error:
        print(error.message)
"""


@pytest.mark.parametrize(
    ("visible", "gpus", "told"),
    [
        ("2", "4", "nccl"),  # as Slurm's --gpus-per-task gives each rank one of its own
        ("0,1", "4", "nccl needs a GPU for each of the 4 ranks of a node, got 2: lower their number"),
    ],
)
def test_each_rank_may_see_a_gpu_of_its_own(tmp_path, devices, visible, gpus, told):
    ranks = {"RANK": "2", "WORLD_SIZE": "4", "LOCAL_RANK": "2", "LOCAL_WORLD_SIZE": "4"}
    ranks |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}
    masked = {} if visible is None else {"CUDA_VISIBLE_DEVICES": visible}
    environment = stand_in(tmp_path / "library", NVML_GPUS=gpus, **ranks, **masked)
    done = subprocess.run(
        [sys.executable, "-c", RANK, str(devices)], cwd=ROOT, env=environment, capture_output=True, text=True
    )
    assert done.stdout.strip() == told, done.stderr


def test_where_there_is_no_device_file_nothing_is_asked(tmp_path, devices):
    (devices / "nvidia0").unlink()
    assert count(devices, stand_in(tmp_path / "library", NVML_GPUS="8")) == "0 False False"


def test_torch_is_asked_where_the_driver_does_not_answer(tmp_path, devices):
    without = stand_in(tmp_path / "library", NVML_GPUS="8", NVML_INIT="9", CUDA_VISIBLE_DEVICES="")
    assert count(devices, without) == "0 True True"


WHOLE = [Gpu("GPU-1a"), Gpu("GPU-1b"), Gpu("GPU-2")]
DIVIDED = [Gpu("GPU-1", ("MIG-a", "MIG-b")), Gpu("GPU-2", ()), Gpu("GPU-3")]


@pytest.mark.parametrize(
    ("gpus", "visible", "number"),
    [
        (WHOLE, None, 3),
        (WHOLE, "", 0),
        (WHOLE, "-1", 0),
        (WHOLE, "none", 0),
        (WHOLE, "0, 2", 2),
        (WHOLE, "2,0,1", 3),
        (WHOLE, "0,-1,1", 1),
        (WHOLE, "0,3,1", 1),
        (WHOLE, "3,0", 0),
        (WHOLE, "0,1,0", 0),
        (WHOLE, "1st,2nd", 2),
        (WHOLE, "GPU-2,GPU-1a", 2),
        (WHOLE, "GPU-1", 0),
        (WHOLE, "GPU-2,GPU-9,GPU-1a", 1),
        (WHOLE, "GPU-2,GPU-2", 0),
        (WHOLE, "GPU-2,0", 1),
        (WHOLE, "0,GPU-2", 1),
        (DIVIDED, None, 1),
        (DIVIDED, "2", 1),
        (DIVIDED, "1", 0),
        (DIVIDED, "1,2", 1),
        (DIVIDED, "2,0", 1),
        (DIVIDED, "GPU-1", 1),
        (DIVIDED, "MIG-a,MIG-b", 1),
        (DIVIDED, "MIG-", 0),
        (DIVIDED, "MIG-c", 0),
        ([], None, 0),
        ([], "0", 0),
    ],
)
def test_devices_are_named_as_cuda_reads_them(gpus, visible, number):
    assert count_cuda_devices(gpus, visible) == number


TORCH = """if True:
    import os, sys, torch
    from flyte_ddp.launch.nvml import count_cuda_devices, list_gpus
    for visible in sys.argv[1:]:
        os.environ["CUDA_VISIBLE_DEVICES"] = visible
        print(visible, torch.cuda.device_count(), count_cuda_devices(list_gpus(), visible))
"""


@pytest.mark.skipif(not torch.version.cuda, reason="needs a torch that is built for CUDA")
def test_torch_counts_the_same(tmp_path):
    """torch has a count of its own by the same library, and the ranks go by it."""
    given = [
        "",
        "0,2",
        "0,-1",
        "3",
        "0,3",
        "0,0",
        "1st",
        "x",
        "GPU-1",
        "GPU-2,GPU-0",
        "GPU-2,GPU-2",
        "GPU-2,0",
        "0,GPU-2",
    ]
    environment = stand_in(tmp_path / "library", NVML_GPUS="3")
    command = [sys.executable, "-c", TORCH, *given]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300)
    rows = [line.rsplit(" ", 2) for line in done.stdout.splitlines()]
    assert [visible for visible, *_ in rows] == given, done.stderr
    assert [row for row in rows if row[1] != row[2]] == []
    assert {torchs for _, torchs, _ in rows} == {"0", "1", "2"}


CLOCKS = "import sys; from flyte_ddp.launch.nvml import why_slow; print([why_slow(f'GPU-{n}') for n in range(5)])"


def test_a_gpu_that_is_hot_or_short_of_power_says_so(tmp_path):
    """1 is idleness, 4 the usual limit of power under load; of the fourth GPU nobody knows, and there is no fifth."""
    environment = stand_in(tmp_path / "library", NVML_GPUS="4", NVML_CLOCKS="0540e8")
    done = subprocess.run([sys.executable, "-c", CLOCKS], cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.stdout.strip() == "['', 'heat', 'heat and power', '', '']", done.stderr
