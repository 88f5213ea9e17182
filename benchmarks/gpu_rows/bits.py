"""Rows on results: on which ranks training works, and that its results are reproducible."""

import hashlib
import importlib.util
import sys
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

from benchmarks.gpu_rows import images
from benchmarks.gpu_rows.fault_settings import SAMPLES, Settings
from benchmarks.gpu_rows.row import Machine, Missing, Row, expect
from benchmarks.gpu_rows.training import FAULTY, IMAGES, train
from examples.charlm.settings import Settings as TextSettings
from flyte_ddp.events import Event, StepLogged
from flyte_ddp.launch.environment import World, visible_gpus
from flyte_ddp.recipes.hyperparameters import Hyperparameters

CHARLM = "examples.charlm.recipe:CharLM"
HP = Hyperparameters(model="fashion_cnn", batch_size=64, epochs=1, precision="float32", log_interval=1, flip=True)


class Unplugged(Exception):
    pass


def counted_without_torch(machine: Machine) -> str:
    if machine.gpus and importlib.util.find_spec("pynvml") is None:
        raise Missing("nvidia-ml-py is not installed, so torch counted them")
    count = visible_gpus()
    expect("torch" not in sys.modules, "the process that starts the ranks has imported torch")
    return f"{count}"


def one_rank(machine: Machine) -> str:
    machine.need_gpus()
    return described(train(FAULTY, Settings(), machine.world(1, "nccl")))


def two_on_one(machine: Machine) -> str:
    return described(train(FAULTY, Settings(), machine.world(2)))


def all_ranks(machine: Machine) -> str:
    machine.need_gpus(2)
    return described(train(FAULTY, Settings(), machine.world(machine.gpus, "nccl")))


def described(results: list[Any]) -> str:
    accuracy = results[0].epochs[-1].test["accuracy"]
    expect(accuracy > 0.8, f"accuracy {accuracy:.1%}")
    return f"{len(results)} ranks, accuracy {accuracy:.1%}"


def from_source(source: str, fraction: float = 0.0) -> Callable[[Machine], str]:
    def check(machine: Machine) -> str:
        settings = Settings(validation_fraction=fraction), Settings(validation_fraction=fraction, source=source)
        expected, found = (train(FAULTY, one, machine.world(1), loader_workers=2)[0].tested for one in settings)
        expect(found == expected, "other measures than from tensors")
        return "as from tensors on the device"

    return check


def alike(precision: str, **options: Any) -> Callable[[Machine], str]:
    """The char-LM trained with these options gives the loss that it has without, up to rounding."""

    def check(machine: Machine) -> str:
        if "compile" in options:
            machine.need_gpus()
        if "sharding" in options and importlib.util.find_spec("safetensors") is None:
            raise Missing("safetensors is not installed")
        if "sharding" in options and tuple(map(int, version("torch").split(".")[:2])) < (2, 15):
            raise Missing("sharding needs torch 2.15")
        world = machine.world(machine.gpus, "nccl") if machine.gpus else machine.world()
        dropout = 0.0 if "compile" in options else 0.1  # compiled code draws other numbers
        settings = TextSettings(epochs=1, characters=20_000, precision=precision, dropout=dropout)
        plain, found = (train(CHARLM, settings, world, **more)[0].tested["loss"] for more in ({}, options))
        expect(abs(found - plain) < 1e-3 * plain, f"a loss of {found:.6f} instead of {plain:.6f}")
        return f"{world.size} ranks, losses {plain:.6f} and {found:.6f}"

    return check


def borrowed_share(machine: Machine) -> str:
    size = next(size for size in range(50, SAMPLES) if SAMPLES % size == 1)
    settings = Settings(batch_size=size, precision="bfloat16")
    return described(train(FAULTY, settings, machine.world(2)))


def weights(machine: Machine, name: str, world: World, data: Path, **more: Any) -> str:
    folder = machine.place / name
    folder.mkdir(exist_ok=True)
    train(IMAGES, HP, world, str(data), str(folder), **more)
    return hashlib.sha256((folder / "model.pt").read_bytes()).hexdigest()


def same_bits(machine: Machine) -> str:
    data, world = images.made_up((1, 28, 28), 1270, machine.place), machine.world()
    first, second = (weights(machine, name, world, data) for name in ("first", "second"))
    expect(first == second, "other weights")
    return f"{world.size} ranks, {HP.model}"


def any_ranks(machine: Machine) -> str:
    data, hp = images.made_up((1, 28, 28), 1270, machine.place), replace(HP, virtual_ranks=3)
    digests = {train(IMAGES, hp, machine.world(ranks), str(data))[0].digest for ranks in (1, 2, 3)}
    expect(len(digests) == 1, f"digests {', '.join(digests)}")
    return f"3 virtual ranks on 1, 2 and 3 ranks under gloo, {HP.model}: weights {digests.pop()}"


def audited(machine: Machine) -> str:
    data, hp = images.made_up((1, 28, 28), 1270, machine.place), replace(HP, virtual_ranks=3)
    (plain, _), (found, _) = (train(IMAGES, hp, machine.world(2), str(data), audit_every=every) for every in (0, 1))
    expect(found.warnings == [], f"{found.warnings}")
    expect(found.digest == plain.digest, f"digests {plain.digest}, {found.digest}")
    return f"each step of 2 ranks under gloo, {HP.model}: weights {found.digest} as without"


def resumed_bits(machine: Machine) -> str:
    data, world = images.made_up((1, 28, 28), 1270, machine.place), machine.world()

    def unplug(event: Event) -> None:
        if isinstance(event, StepLogged) and event.step == 7:
            raise Unplugged

    with suppress(Unplugged):
        weights(machine, "cut", world, data, on_event=unplug, checkpoint_seconds=0)
    expect((machine.place / "cut" / "checkpoint").exists(), "no checkpoint was left")
    cut, whole = weights(machine, "cut", world, data), weights(machine, "whole", world, data)
    expect(cut == whole, "other weights")
    return f"{world.size} ranks, cut off after step 7"


ROWS = [
    Row("GPUs counted, without torch", counted_without_torch),
    Row("one rank under nccl", one_rank),
    Row("two ranks under gloo, on one GPU if there is one", two_on_one),
    Row("all ranks under nccl", all_ranks),
    Row("sharded over all ranks", alike("float32", sharding="full"), is_quick=False),
    Row("sharded over all ranks, in bfloat16", alike("bfloat16", sharding="full"), is_quick=False),
    Row("compiled by torch.compile", alike("float32", compile=True), is_quick=False),
    Row("samples from a memory map", from_source("memory map"), is_quick=False),
    Row("samples from a Dataset, by loader workers", from_source("dataset"), is_quick=False),
    Row("validation samples held out of a memory map", from_source("memory map", 0.25), is_quick=False),
    Row("a rank that borrows a sample, batch norm in bfloat16", borrowed_share, is_quick=False),
    Row("same seed, same bits", same_bits, is_quick=False),
    Row("the same bits on any number of ranks", any_ranks),
    Row("audits name nobody, and change nothing", audited, is_quick=False),
    Row("interrupted and resumed, same bits", resumed_bits),
]
