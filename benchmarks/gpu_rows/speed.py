"""Rows on speed: of a step, and to an accuracy."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.gpu_rows import images
from benchmarks.gpu_rows.row import Machine, Missing, Row
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


def steps_of(machine: Machine, network: str, target: str, samples: int, **settings: Any) -> Any:
    """What the target returns on the only rank of a training on made-up images."""
    shape, hp = NETWORKS[network]["shape"], {key: one for key, one in NETWORKS[network].items() if key != "shape"}
    world = machine.world(1, "nccl" if machine.gpus else "gloo")
    data = images.made_up(shape, samples, machine.place)
    hyperparameters = Hyperparameters(**{"model": network, "epochs": 1, "log_interval": 1000, **hp, **settings})
    return train(IMAGES, hyperparameters, world, str(data), target=target)[0]


def milliseconds(network: str) -> Callable[[Machine], str]:
    def check(machine: Machine) -> str:
        samples = 51200 if machine.gpus else 1280
        result = steps_of(machine, network, "flyte_ddp.engine.worker:run", samples, epochs=2)
        return f"{result.epochs[-1].train_seconds / (samples / 128) * 1e3:.2f} ms, batches of 128, {result.precision}"

    return check


def waits(network: str, **settings: Any) -> Callable[[Machine], str]:
    def check(machine: Machine) -> str:
        machine.need_gpus()
        return f"{steps_of(machine, network, f'{STEPS}find_waits', 5120, **settings)} steps"

    return check


def gpu(machine: Machine) -> str:
    machine.need_gpus()
    return str(launcher.launch(f"{STEPS}describe", World(1, 1, "nccl", "cuda"), None, 120, lambda event: None)[0])


def mnist_to_99(machine: Machine) -> str:
    machine.need_gpus()
    if not machine.data:
        raise Missing("no data: --data FOLDER")
    try:
        data = images.mnist(machine.data, machine.place)
    except OSError as error:
        raise Missing(f"no data: {error}") from None
    epochs = train(IMAGES, Hyperparameters(epochs=5), machine.world(1, "nccl"), str(data))[0].epochs
    seconds = 0.0
    for epoch in epochs:
        seconds += epoch.train_seconds
        if epoch.test["accuracy"] >= 0.99:
            return f"{seconds:.1f} s of training, {epoch.epoch + 1} epochs"
    return f"not reached: {max(epoch.test['accuracy'] for epoch in epochs):.2%} after {seconds:.1f} s"


ROWS = [
    Row("the GPU, and whether torch supports it", gpu),
    *(Row(f"a step, {network}", milliseconds(network), is_quick=False) for network in NETWORKS),
    *(Row(f"the host never waits in a step, {network}", waits(network)) for network in NETWORKS),
    Row("the host never waits in a step by virtual ranks, mnist_cnn", waits("mnist_cnn", virtual_ranks=2)),
    Row("MNIST to 99 %", mnist_to_99),
]
