"""The training task's body: from typed Flyte inputs to ranks and back to typed outputs."""

import time
from dataclasses import dataclass
from pathlib import Path
from typing import Callable, List, NamedTuple

from flytekit.types.directory import FlyteDirectory
from flytekit.types.file import PythonPickledFile

from workflows.observers.console import Console, say
from workflows.tasks.checkpoints import checkpoint_store
from workflows.tasks.execution import flyte_retries, is_local, run_dir
from workflows.tasks.versions import TRAINING_SOURCES, code_version
from workflows.training import launcher, prepared
from workflows.training.environment import choose_world
from workflows.training.events import Event
from workflows.training.hyperparameters import Hyperparameters, RunOptions
from workflows.training.job import Identity, Job, TrainingResult

WORKER = "workflows.training.worker:run"  # a name, because importing it would import torch
TRAINING_CODE = (TRAINING_SOURCES, ("torch",))


@dataclass(frozen=True)
class TrainingSummary:
    """What came out, in figures.

    Attributes:
        dataset: what the model was trained on (digits where it stood in for MNIST).
        train_samples: number of training images.
        test_samples: number of test images.
        test_loss: mean loss on the test images after the last epoch.
        accuracy: share of the test images classified correctly after the last epoch, from 0 to 1.
        train_seconds: in the training loops alone.
        total_seconds: of the whole task.
        samples_per_second: training images, all ranks together, per second of train_seconds.
        world_size: number of ranks.
        backend: nccl or gloo.
        device: cuda or cpu.
        precision: float32 or bfloat16.
    """

    dataset: str
    train_samples: int
    test_samples: int
    test_loss: float
    accuracy: float
    train_seconds: float
    total_seconds: float
    samples_per_second: float
    world_size: int
    backend: str
    device: str
    precision: str


class TrainingOutputs(NamedTuple):
    """The accuracy on the test split after each epoch (0 to 1), the trained weights (a CPU state_dict), the figures."""

    epoch_accuracies: List[float]
    model_state: PythonPickledFile
    summary: TrainingSummary


def train(hp: Hyperparameters, data: FlyteDirectory, options: RunOptions) -> TrainingOutputs:
    """Trains hp.model on a prepared dataset with one process per rank; see launcher.launch for what it raises."""
    started = time.time()
    world = choose_world(hp.backend, options.nproc, hp.batch_size)
    launcher.warm_up()  # imports torch while the data arrive and are verified
    with flyte_retries():
        data_folder = Path(data.download())
        description = prepared.verify(data_folder)
        identity = Identity(hp, description.digest, code_version(*TRAINING_CODE))
        with run_dir(description.name) as folder, checkpoint_store(identity.key, options.resume) as store:
            job = Job(
                identity=identity,
                data=str(data_folder),
                model_path=str(folder / "model.pt"),
                predictions_path=str(folder / "predictions.npy"),
                checkpoint_path=str(store.path),
                checkpoint_seconds=options.checkpoint_seconds,
                # beyond the parent's own patience, so that it can still ask all ranks where they hang
                timeout_seconds=options.timeout_seconds + 60,
                launched=time.time(),
            )
            observers = to_all(Console(), store.on_event)
            results: List[TrainingResult] = launcher.launch(WORKER, world, job, options.timeout_seconds, observers)
    result = results[0]
    last, train_seconds = result.epochs[-1], sum(epoch.train_seconds for epoch in result.epochs)
    summary = TrainingSummary(
        dataset=description.name,
        train_samples=description.train_samples,
        test_samples=description.test_samples,
        test_loss=last.test_loss,
        accuracy=last.accuracy,
        train_seconds=train_seconds,
        total_seconds=time.time() - started,
        samples_per_second=description.train_samples * hp.epochs / train_seconds,
        world_size=world.size,
        backend=world.backend,
        device=world.device,
        precision=result.precision,
    )
    say(f"Trained on {summary.dataset}: test accuracy {summary.accuracy:.2%}. Model: {job.model_path}")
    # A local run's file stays where it is: flytekit would copy it to a temporary place
    model_state = PythonPickledFile(job.model_path, remote_path=False if is_local() else None)
    return TrainingOutputs([epoch.accuracy for epoch in result.epochs], model_state, summary)


def to_all(*observers: Callable[[Event], None]) -> Callable[[Event], None]:
    """One observer that tells many. One that raises is left out from then on: looking on must not stop training."""
    listening = list(observers)

    def tell(event: Event) -> None:
        for observer in list(listening):
            try:
                observer(event)
            except Exception as error:
                listening.remove(observer)
                say(f"Warning: {type(observer).__name__} gave up: {type(error).__name__}: {error}")

    return tell
