"""The training without Flyte: by itself, under torchrun, and under whoever else sets the variables."""

import functools
import json
import os
import re
import signal
import subprocess
import sys

import pytest
import torch

from flyte_ddp.errors import InputError
from flyte_ddp.launch.environment import environment_from_variables
from tests.commands import ROOT, free_port, same
from tests.pod import CORES

HP = '{"dataset": "digits", "epochs": 1, "batch_size": 512, "train_fraction": 0.2, "precision": "float32"}'
MODULE = ("-m", "workflows.without_flyte")


def on_cores(count):
    """As many threads for each rank decide the last bits, wherever it runs."""
    return functools.partial(os.sched_setaffinity, 0, [next(CORES) for _ in range(count)])


def start(output, *command, hp=HP, cores=2, **environment):
    """One node's command, or one rank's."""
    return subprocess.Popen(
        [*command, *MODULE, "--hp", hp, "--output", str(output)],
        cwd=ROOT,
        env={**os.environ, **environment},
        preexec_fn=on_cores(cores),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def weights(output, *processes):
    """What the processes of one training have come to."""
    said = [process.communicate(timeout=300) for process in processes]
    assert [process.returncode for process in processes] == [0] * len(processes), said
    (answer,) = (json.loads(out) for out, _ in said if out.strip())
    assert answer["model_state"] == str(output / "model.pt")
    assert len(answer["epoch_accuracies"]) == 1
    assert sorted(file.name for file in output.iterdir()) == ["model.pt", "predictions.npy", "progress.jsonl"]
    return torch.load(output / "model.pt", weights_only=True)


@pytest.fixture(scope="module")
def by_pyflyte():
    """The weights of a run that starts cold, as its user has it."""
    command = ["pyflyte", "run", "workflows/mnist.py", "pytorch_training_wf", "--hp", HP]
    command += ["--options", '{"nproc": 2, "tracking": "off"}']
    done = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True, preexec_fn=on_cores(2))
    (model,) = re.findall(r"model_state=([^,]+),", done.stdout)
    return torch.load(model, weights_only=True)


@pytest.fixture
def port():
    return str(free_port())


def test_ranks_of_torchrun_have_the_same_result_as_pyflytes(by_pyflyte, tmp_path, port):
    one_node = ("torchrun", "--nproc-per-node", "2", "--master-port", port)
    assert same(weights(tmp_path / "one", start(tmp_path / "one", *one_node)), by_pyflyte)


@pytest.mark.slow
def test_ranks_of_torchrun_can_train_again_and_again(tmp_path):
    script = tmp_path / "again.py"
    script.write_text(
        "from contextlib import suppress\n"
        "from flyte_ddp.errors import InputError\n"
        "from flyte_ddp.settings import TrainingSettings\n"
        "from flyte_ddp.training import train\n"
        "with suppress(InputError):\n"  # a training that is refused leaves its process group
        "    train('tests.engine.probe_recipes:Undirected', TrainingSettings(validation_fraction=0.2), output='no')\n"
        "for number in range(2):\n"
        "    settings = TrainingSettings(epochs=1, seed=number)\n"
        "    train('tests.engine.probe_recipes:Sound', settings, output=f'trained-{number}')\n"
    )
    command = ["torchrun", "--standalone", "--nproc-per-node", "2", str(script)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert len(list(tmp_path.glob("trained-*/model.pt"))) == 2


@pytest.mark.slow
def test_a_stopped_run_says_what_resumes_it(tmp_path):
    hp = json.dumps({**json.loads(HP), "log_interval": 1})  # it decides nothing but how soon there is a line
    process = start(tmp_path / "out", sys.executable, hp=hp)
    for line in process.stderr:
        if line.startswith("Train Epoch"):
            break
    process.send_signal(signal.SIGTERM)
    assert f"the same command resumes from {tmp_path}/out/checkpoint" in process.communicate(timeout=60)[1]
    assert process.returncode == 1
    assert (tmp_path / "out" / "checkpoint").is_file()


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--hp", '{"epochz": 1}'], "did you mean epochs?"),
        (["--options", '{"tracking": "off"}'], "trackers and the report come with pyflyte"),
        (["--options", '{"nproc": 1}'], "left out under torchrun"),
    ],
)
def test_wrong_input_is_refused_in_a_line(arguments, words):
    environment = {**os.environ, "WORLD_SIZE": "2"}
    done = subprocess.run(
        [sys.executable, *MODULE, *arguments], cwd=ROOT, env=environment, capture_output=True, text=True
    )
    assert done.returncode == 2
    assert words in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("left", "words"),
    [
        ({"WORLD_SIZE": "2"}, "RANK is not set: WORLD_SIZE=2 says that torchrun"),
        ({"WORLD_SIZE": "1", "RANK": "0"}, "MASTER_ADDR is not set: WORLD_SIZE=1 says that torchrun"),
        (
            {"WORLD_SIZE": "two", "RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"},
            "WORLD_SIZE must be a whole number, as torchrun sets it, got 'two'",
        ),
    ],
)
def test_variables_that_something_else_has_left_are_named(left, words, monkeypatch):
    for name, value in left.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(InputError, match=words) as refused:
        environment_from_variables("gloo")
    assert "unset it" in refused.value.message or "must be" in refused.value.message


def test_its_parent_needs_neither_flytekit_nor_torch():
    program = (
        "import logging, sys, workflows.without_flyte; print(logging.getLogger('flyte_ddp').handlers, "
        "[name for name in sys.modules if name in ('flytekit', 'torch')])"
    )
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, check=True, capture_output=True, text=True)
    assert done.stdout == "[] []\n", "and to import is not to print"
