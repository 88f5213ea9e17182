"""The hardware workflow, by pyflyte and with a stand-in for the driver that this machine may not have."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from flyte_ddp.launch.environment import available_cores, choose_world
from flyte_ddp.recipes.hyperparameters import Hyperparameters
from flyte_ddp.settings import RunOptions
from tests.commands import ROOT, pyflyte, pyflyte_process, words
from tests.nvml import stand_in
from tests.pod import Pod, literal, package

MNIST = "mnist.pytorch_mnist_task"


def test_it_says_what_is_here_and_what_a_training_would_do(tmp_path):
    done = pyflyte(str(ROOT / "workflows/hardware.py"), "hardware_wf", "--options", '{"nproc": 1}', cwd=tmp_path)
    world = choose_world("auto", 1, 128)
    assert f"1 with {world.backend}, on {world.device}\n" in done.stderr
    assert f"{available_cores()} for each rank\n" in done.stderr
    assert "\nWarnings\n  - " in done.stderr
    assert f"world_size=1, backend='{world.backend}'" in done.stdout
    (report,) = re.findall(r"report=(\S+?)\)", done.stdout)
    assert "<h2>Between GPUs</h2>" in Path(report).read_text()


@pytest.mark.slow
def test_gpus_that_torch_cannot_use_are_named_and_an_impossible_training_is_told_apart_from_a_wrong_input(tmp_path):
    library = stand_in(tmp_path / "library")["LD_LIBRARY_PATH"]
    with_eight = {"LD_LIBRARY_PATH": library, "NVML_GPUS": "8", "CUDA_VISIBLE_DEVICES": ""}
    arguments = (str(ROOT / "workflows/hardware.py"), "hardware_wf", "--hp", '{"backend": "nccl"}')
    done = pyflyte_process(*arguments, cwd=tmp_path, environment=with_eight)
    for text in (
        "7 x NVIDIA H100 80GB HBM3, 81559 MiB, 1 x NVIDIA H100 80GB HBM3, [GPU is lost] MiB",
        "570.86, runs CUDA up to 12.8",
        'torch uses 0 of 8 GPUs, and CUDA_VISIBLE_DEVICES is ""',
        'a training with these inputs is refused: backend "nccl" needs a GPU',
    ):
        assert text in done.stderr

    wrong = pyflyte("workflows/hardware.py", "hardware_wf", "--options", '{"nprocs": 2}', status=2)
    assert "did you mean nproc?" in words(wrong.stderr)


@pytest.mark.slow
def test_the_parent_never_imports_torch():
    program = "import sys; from workflows.hardware import hardware_wf; hardware_wf(); print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.stdout == "False\n", done.stderr


@pytest.mark.slow
def test_a_pod_gets_what_a_training_gets_and_shows_the_page_as_deck(tmp_path):
    task, training = (package().tasks[f"workflows.{name}"] for name in ("hardware.inspect_hardware", MNIST))
    assert task.container.resources == training.container.resources
    assert task.extended_resources == training.extended_resources
    pod = Pod(task, {"hp": literal(Hyperparameters()), "options": literal(RunOptions(nproc=1))}, tmp_path / "pod")
    outputs = pod.run()
    assert outputs["text"].scalar.primitive.string_value in pod.log
    assert outputs["report"].scalar.blob.uri.startswith(str(tmp_path / "pod" / "raw"))
    assert "<h2>Between GPUs</h2>" in (tmp_path / "pod" / "deck.html").read_text()
