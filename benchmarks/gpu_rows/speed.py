"""Rows on speed: of a step, to an accuracy, and compared with others on the same GPU."""

import importlib.util
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.gpu_rows import images
from benchmarks.gpu_rows.row import Machine, Missing, Row, expect
from benchmarks.gpu_rows.training import IMAGES, train
from flyte_ddp.launch import launcher
from flyte_ddp.launch.environment import World
from flyte_ddp.recipes.hyperparameters import Hyperparameters

STEPS = "benchmarks.gpu_rows.steps:"
ROOT = Path(__file__).parents[2]
NETWORKS: dict[str, Any] = {
    "mnist_cnn": {"shape": (1, 28, 28)},
    "resnet9_small": {"shape": (3, 32, 32), "flip": True, "shift_pixels": 2, "ema_decay": 0.99},
}
# presets/cifar10-94.yaml, for a machine without a reader of YAML
CIFAR10_94: dict[str, Any] = {
    "model": "airbench94",
    "epochs": 10,
    "batch_size": 1024,
    "learning_rate": 1.5,
    "sgd_momentum": 0.85,
    "weight_decay": 0.0013,
    "norm_bias_factor": 64,
    "warmup_fraction": 0.23,
    "label_smoothing": 0.2,
    "clip_norm": 0,
    "shift_pixels": 2,
    "flip": True,
    "alternate_flips": True,
}
GOALS: dict[str, Any] = {
    "mnist": (0.99, {"model": "mnist_cnn", "epochs": 5}),
    "cifar10": (0.94, CIFAR10_94),
}


def steps_of(machine: Machine, network: str, target: str, samples: int, **settings: Any) -> Any:
    """What the target returns on the only rank of a training on made-up images."""
    shape, hp = NETWORKS[network]["shape"], {key: one for key, one in NETWORKS[network].items() if key != "shape"}
    world = machine.world(1, "nccl" if machine.gpus else "gloo")
    data = images.made_up(shape, samples, machine.place)
    hyperparameters = Hyperparameters(**{"model": network, "epochs": 1, "log_interval": 1000, **hp, **settings})
    return train(IMAGES, hyperparameters, world, str(data), target=target)[0]


def operations(network: str) -> Callable[[Machine], str]:
    def check(machine: Machine) -> str:
        count, names = steps_of(machine, network, f"{STEPS}count_operations", 1280)
        waits = [name for name in names if name in ("aten::_local_scalar_dense", "aten::nonzero", "aten::lift_fresh")]
        expect(not waits, f"the host waits for {', '.join(waits)}")
        return f"{count:.0f}"

    return check


def launches(network: str) -> Callable[[Machine], str]:
    def check(machine: Machine) -> str:
        machine.need_gpus()
        return f"{steps_of(machine, network, f'{STEPS}count_launches', 2560):.0f}"

    return check


def milliseconds(network: str) -> Callable[[Machine], str]:
    def check(machine: Machine) -> str:
        samples = 51200 if machine.gpus else 1280
        result = steps_of(machine, network, "flyte_ddp.engine.worker:run", samples, epochs=2)
        return f"{result.epochs[-1].train_seconds / (samples / 128) * 1e3:.2f} ms, batches of 128, {result.precision}"

    return check


def waits(network: str) -> Callable[[Machine], str]:
    def check(machine: Machine) -> str:
        machine.need_gpus()
        return f"{steps_of(machine, network, f'{STEPS}find_waits', 5120)} steps"

    return check


def gpu(machine: Machine) -> str:
    machine.need_gpus()
    return str(launcher.launch(f"{STEPS}describe", World(1, 1, "nccl", "cuda"), None, 120, lambda event: None)[0])


def tf32(machine: Machine) -> str:
    machine.need_gpus()
    world = World(1, 1, "nccl", "cuda")
    (found,) = launcher.launch(f"{STEPS}compare_tf32", world, None, 120, lambda event: None)
    expect(found[1] < 1e-5, f"IEEE float32 has an error of {found[1]:.1e}")
    return f"errors {found[0]:.1e} and {found[1]:.1e}, {found[2]:.2f} and {found[3]:.2f} ms"


def to_accuracy(name: str) -> Callable[[Machine], str]:
    def check(machine: Machine) -> str:
        machine.need_gpus()
        data = prepared(machine, name)
        goal, settings = GOALS[name]
        epochs = train(IMAGES, Hyperparameters(**settings), machine.world(1, "nccl"), str(data))[0].epochs
        seconds = 0.0
        for epoch in epochs:
            seconds += epoch.train_seconds
            if epoch.test["accuracy"] >= goal:
                return f"{seconds:.1f} s of training, {epoch.epoch + 1} epochs"
        return f"not reached: {max(epoch.test['accuracy'] for epoch in epochs):.2%} after {seconds:.1f} s"

    return check


def prepared(machine: Machine, name: str) -> Path:
    if not machine.data:
        raise Missing("no data: --data FOLDER")
    try:
        return images.prepare(name, machine.data, machine.place)
    except OSError as error:
        raise Missing(f"no data: {error}") from None


def against(benchmark: str, package: str) -> Callable[[Machine], str]:
    """Another benchmark of this folder, run once; also needs what is installed with Flyte."""

    def check(machine: Machine) -> str:
        machine.need_gpus()
        for one in (package, "flytekit", "torchvision"):
            if importlib.util.find_spec(one) is None:
                raise Missing(f"{one} is not installed")
        if not machine.data:
            raise Missing("no data: --data FOLDER")
        mirror = {"DDP_DATA_MIRROR": (machine.data / "MNIST" / "raw").absolute().as_uri()}
        command = [sys.executable, "-m", f"benchmarks.{benchmark}", "--runs", "1"]
        done = subprocess.run(command, cwd=ROOT, env={**os.environ, **mirror}, capture_output=True, text=True)
        expect(done.returncode == 0, done.stderr.strip()[-200:])
        rows = [line.strip("| ") for line in done.stdout.splitlines() if line.startswith("|")]
        return "; ".join(row.replace("|", ",") for row in rows[2:])

    return check


ROWS = [
    Row("the GPU, and whether torch supports it", gpu),
    *(Row(f"operations of a step, {network}", operations(network)) for network in NETWORKS),
    *(Row(f"launches of a step, {network}", launches(network)) for network in NETWORKS),
    *(Row(f"a step, {network}", milliseconds(network), is_quick=False) for network in NETWORKS),
    *(Row(f"the host never waits in a step, {network}", waits(network)) for network in NETWORKS),
    Row("a convolution in TF32 and in IEEE's float32", tf32),
    Row("MNIST to 99 %", to_accuracy("mnist")),
    Row("CIFAR-10 to 94 %, airbench94", to_accuracy("cifar10")),
    Row("the tutorial, and us", against("against_tutorial", "torch")),
    Row("Lightning, and us", against("against_lightning", "lightning")),
]
