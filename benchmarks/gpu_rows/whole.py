"""Rows on whole trainings on a GPU: memory, precision, predictions, time to stop, what the options gain or cost."""

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from contextlib import suppress

import numpy as np

from benchmarks.gpu_rows import images
from benchmarks.gpu_rows.fault_settings import Settings
from benchmarks.gpu_rows.row import Machine, Row, expect
from benchmarks.gpu_rows.speed import ROOT, STEPS, steps_of
from benchmarks.gpu_rows.training import IMAGES, train
from benchmarks.slowed_settings import SLOWED
from benchmarks.slowed_settings import Settings as Slowed
from examples.charlm.settings import Settings as TextSettings
from flyte_ddp.events import CheckpointWritten, Event, RunStarted, StepLogged
from flyte_ddp.launch import launcher
from flyte_ddp.launch.environment import World
from flyte_ddp.launch.failures import PreemptedError
from flyte_ddp.recipes.hyperparameters import Hyperparameters

CHARLM, WIDE = "examples.charlm.recipe:CharLM", "benchmarks.gpu_rows.wide:Wide"
CPU = World(1, 1, "gloo", "cpu")


class Unplugged(Exception):
    pass


def one(machine: Machine) -> World:
    return machine.world(1, "nccl" if machine.gpus else "gloo")


def peaks(machine: Machine) -> str:
    machine.need_gpus()
    settings = Settings(epochs=2, batch_size=32)
    trials, steps, weights = train(WIDE, settings, one(machine), target=f"{STEPS}measure_peaks")[0]
    found = f"trials {trials / weights:.2f}, steps {steps / weights:.2f} times the weights of {weights >> 20} MiB"
    expect(trials <= 1.05 * steps and steps < 5.5 * weights, found)
    return found


def stall(machine: Machine) -> str:
    events: list[Event] = []
    train(WIDE, Settings(epochs=1, batch_size=128), one(machine), on_event=events.append, checkpoint_seconds=0)
    written = [event for event in events if isinstance(event, CheckpointWritten)]
    expect(bool(written), "no checkpoint was written")
    stalls = [f"{event.stall_seconds:.2f}" for event in written]
    return f"{len(written)} checkpoints, training waited {', '.join(stalls[:4])} s"


def precision(machine: Machine) -> str:
    """What is begun on a GPU goes on on a CPU in the same precision."""
    machine.need_gpus()
    settings, folder = (
        TextSettings(epochs=1, characters=100_000, precision="auto", log_interval=1),
        machine.place / "auto",
    )
    folder.mkdir()
    begun: list[str] = []

    def unplug(event: Event) -> None:
        if isinstance(event, RunStarted):
            begun.append(event.precision)
        if isinstance(event, StepLogged) and event.step == 12:
            raise Unplugged

    with suppress(Unplugged):
        train(CHARLM, settings, one(machine), folder=str(folder), on_event=unplug, checkpoint_seconds=0)
    started: list[RunStarted] = []
    result = train(
        CHARLM, settings, CPU, folder=str(folder),
        on_event=lambda event: started.append(event) if isinstance(event, RunStarted) else None,
    )[0]  # fmt: skip
    expect(started[0].first_step > 0, "it began anew")
    expect(begun == [result.precision], f"{begun} on the GPU, {result.precision} afterwards")
    return f"{result.precision} on the GPU and then on the CPU, from step {started[0].first_step}"


def predictions(machine: Machine) -> str:
    """Two ranks leave the predictions that one does."""
    data, found = images.made_up((1, 28, 28), 640, machine.place), []
    for ranks in (1, 2):
        folder = machine.place / f"predictions-{ranks}"
        folder.mkdir()
        # A network without batch norm and dropout, which depend on the ranks
        hp = Hyperparameters(model="mnist_cnn", batch_size=64, epochs=1, precision="float32", learning_rate=0.01)
        train(IMAGES, hp, machine.world(ranks), str(data), str(folder))
        found.append(np.load(folder / "predictions.npy"))
    expect(found[0].shape == found[1].shape, f"{found[0].shape} and {found[1].shape}")
    gap = np.abs(found[0].astype(np.float64) - found[1]).mean() / np.abs(found[0]).mean()
    expect(gap < 0.05, f"they differ by {gap:.1%}")
    return f"{found[0].shape}, {gap:.2%} apart after an epoch"


def devices_of_now(machine: Machine) -> str:
    machine.need_gpus()
    before, counts = os.environ.get("CUDA_VISIBLE_DEVICES"), []
    try:
        for visible in (before, ""):
            if visible is not None:
                os.environ["CUDA_VISIBLE_DEVICES"] = visible
            counts += launcher.launch(
                f"{STEPS}count_devices", World(1, 1, "gloo", "cpu"), None, 120, lambda event: None
            )
    finally:
        os.environ.pop("CUDA_VISIBLE_DEVICES", None)
        os.environ.update({} if before is None else {"CUDA_VISIBLE_DEVICES": before})
    expect(counts[0] > 0 and counts[1] == 0, f"ranks see {counts} GPUs")
    return f"{counts[0]}, then none"


def stops_in_time(machine: Machine) -> str:
    """Asked between two logs to stop, by a platform that waits ten seconds, and to checkpoint every second."""
    events: list[Event] = []
    stop = threading.Timer(5, os.kill, (os.getpid(), signal.SIGTERM))

    def listen(event: Event) -> None:
        events.append(event)
        if isinstance(event, RunStarted):
            stop.start()

    settings = Slowed(way="forward pass", rank=0, milliseconds=300, epochs=100, log_interval=10**6)
    try:
        train(SLOWED, settings, one(machine), on_event=listen, checkpoint_seconds=1)
    except PreemptedError as stopped:
        expect("no step" not in str(stopped), str(stopped))
        written = sum(isinstance(event, CheckpointWritten) for event in events)
        expect(written > 1, f"{written} checkpoint before it was asked to stop")
        return f"{written} checkpoints, the last at the stop"
    finally:
        stop.cancel()
    raise AssertionError("it did not stop")


def overridden(machine: Machine) -> str:
    """In an image that asks for TF32 in all products."""
    machine.need_gpus()
    program = (
        "import torch; from flyte_ddp.engine.arithmetic import settle_arithmetic\n"
        "settle_arithmetic(); torch.manual_seed(0)\n"
        "one = torch.randn(512, 512, device='cuda'); exact = one.double() @ one.double()\n"
        "print(float((one @ one - exact).norm() / exact.norm()))"
    )
    environment = {**os.environ, "TORCH_ALLOW_TF32_CUBLAS_OVERRIDE": "1"}
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, env=environment, capture_output=True, text=True)
    expect(done.returncode == 0, done.stderr.strip()[-300:])
    error = float(done.stdout.split()[-1])
    expect(error < 1e-5, f"an error of {error:.1e}")
    return f"an error of {error:.1e}"


def reproducible(network: str) -> Callable[[Machine], str]:
    def check(machine: Machine) -> str:
        machine.need_gpus()
        told = []
        for target in ("flyte_ddp.engine.worker:run", f"{STEPS}train_in_any_order"):
            result = steps_of(machine, network, target, 25_600, epochs=2, precision="float32")
            told.append(result.epochs[-1].train_seconds / (25_600 / 128) * 1e3)
        return f"{told[0]:.2f} ms a step, {told[1]:.2f} ms with torch's own settings (TF32, any order)"

    return check


ROWS = [
    Row("memory of the trials and of steps", peaks),
    Row("auto stays what it was, on another machine", precision),
    Row("predictions of two ranks on one GPU", predictions, is_quick=False),
    Row("ranks see the devices of now", devices_of_now),
    Row("TF32 asked for by the image is off", overridden),
    Row("asked to stop between two logs", stops_in_time, is_quick=False),
]
LATER = [  # figures, for which there is no claim
    Row("checkpoints of 100 million parameters", stall, is_quick=False),
    *(Row(f"what the same bits cost, {network}", reproducible(network)) for network in ("mnist_cnn", "resnet9_small")),
]
