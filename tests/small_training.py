"""Small real trainings: scikit-learn's digits, real processes, real gloo."""

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from flyte_ddp.code.user_code import find_code
from flyte_ddp.data.prepared import prepared
from flyte_ddp.data.prepared.writer import write_prepared
from flyte_ddp.data.sources.datasets import prepare
from flyte_ddp.engine.job import TrainingResult, job_in, make_subject
from flyte_ddp.events import Event, StartUp, StepLogged
from flyte_ddp.launch import launcher
from flyte_ddp.launch.environment import choose_world
from flyte_ddp.recipes.hyperparameters import Hyperparameters
from flyte_ddp.settings import RunOptions, TrainingSettings

WORKER = "flyte_ddp.engine.worker:run"
TWO_HOSTS = "tests.launch.targets:train_on_two_hosts"
RECIPE = "flyte_ddp.recipes.images:ImageClassifier"


class Trained(NamedTuple):
    result: TrainingResult
    weights: dict[str, Any]
    events: list[Event]  # from RunStarted on
    folder: Path


@pytest.fixture(scope="session")
def small_data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_small(tmp_path_factory.mktemp("data") / "small")


def write_small(folder: Path) -> Path:
    """318 real digits to train on: with batches of 16, nineteen whole ones and one of 14; 50 to test on.

    Their middle alone, 16 x 16, for which the default network multiplies a tenth as often.
    """
    digits = prepare("digits")
    train_images, train_labels = prepared.open_split(digits, "train")
    test_images, test_labels = prepared.open_split(digits, "test")
    write_prepared(
        folder, "small", [str(digit) for digit in range(10)],
        train_images[:318, :, 6:22, 6:22], train_labels[:318], test_images[:50, :, 6:22, 6:22], test_labels[:50],
    )  # fmt: skip
    return folder


@pytest.fixture
def train(small_data: Path, tmp_path: Path) -> Callable[..., Trained]:
    """train(nproc, on_event=..., name=..., data=..., **hyperparameters): one training by real ranks.

    Trainings of the same name share a checkpoint.
    """
    return trainer(small_data, tmp_path)


@pytest.fixture(scope="session")
def whole(small_data: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Trained]:
    """whole(nproc, **hyperparameters): as train, but undisturbed, once for equal arguments, and for reading only."""

    @functools.cache
    def once(*arguments: Any, **more: Any) -> Trained:
        trained: Trained = trainer(small_data, tmp_path_factory.mktemp("whole"))(*arguments, **more)
        return trained

    return once


def trainer(small_data: Path, parent: Path) -> Callable[..., Any]:
    def run(
        nproc: int = 2,
        on_event: Callable[[Event], None] = lambda event: None,
        checkpoint_seconds: float = 1e9,
        timeout_seconds: float = 120,
        name: str = "training",
        target: str = WORKER,
        recipe: str = RECIPE,
        data: Path = small_data,
        loader_workers: int = 0,
        init: Path | None = None,
        keep_best: int = 0,
        audit_every: int = 0,
        trace_every: int = 0,
        odd_hosts: str = "warn",
        keep_checkpoint: bool = True,
        sharding: str = "off",
        kind: type[TrainingSettings] = Hyperparameters,
        **hyperparameters: Any,
    ) -> Any:
        import torch

        folder = parent / name
        folder.mkdir(exist_ok=True)
        hp = kind(**{"batch_size": 16, "epochs": 1, "precision": "float32", **hyperparameters})
        options = RunOptions(
            checkpoint_seconds=checkpoint_seconds,
            timeout_seconds=timeout_seconds,
            loader_workers=loader_workers,
            keep_checkpoint=keep_checkpoint,
            keep_best=keep_best,
            audit_every=audit_every,
            trace_every=trace_every,
            odd_hosts=odd_hosts,
            sharding=sharding,
        )
        subject = make_subject(find_code(recipe), hp, data, init, prepared.read_description(data))
        job = job_in(folder, subject, options)
        events: list[Event] = []

        def listen(event: Event) -> None:
            if not isinstance(event, StartUp):
                events.append(event)
            on_event(event)

        world = choose_world("gloo", nproc, hp.batch_size)
        results = launcher.launch(target, world, job, timeout_seconds, listen)
        if not isinstance(results[0], TrainingResult):
            return results
        return Trained(results[0], torch.load(folder / "model.pt", weights_only=True), events, folder)

    return run


class Unplugged(Exception):
    """Raised by a test in the parent, whose ranks are then killed with SIGKILL."""


def unplug_at(step: int, epoch: int = 0):
    """An observer that ends the run at this step, as a power cut would."""

    def on_event(event):
        if isinstance(event, StepLogged) and (event.epoch, event.step) == (epoch, step):
            raise Unplugged

    return on_event


def relative_difference(first: Trained, second: Trained) -> float:
    """Largest difference of any weight, relative to the largest of its tensor, or to 0.001: some biases stay near 0."""
    assert first.weights.keys() == second.weights.keys()
    return max(
        float((weight - second.weights[name]).abs().max() / max(1e-3, float(weight.abs().max())))
        for name, weight in first.weights.items()
    )


def identical(first: Trained, second: Trained) -> bool:
    import torch

    same_weights = all(torch.equal(weight, second.weights[name]) for name, weight in first.weights.items())
    return same_weights and metrics(first) == metrics(second)


def differences(state: Any, other: Any) -> list[Any]:
    """Where two states that checkpoints have differ; empty if they have the same bits."""
    import torch

    from flyte_ddp.engine.torch_compat import pytree

    ours, theirs = (dict(pytree.tree_flatten_with_path(one)[0]) for one in (state, other))

    def is_same(path: Any) -> bool:
        one, another = ours.get(path), theirs.get(path)
        if isinstance(one, torch.Tensor) and isinstance(another, torch.Tensor):
            return torch.equal(one, another)
        return bool(one == another)

    return [path for path in ours | theirs if not is_same(path)]


def metrics(trained: Trained):
    """All figures of all epochs but the seconds."""
    return [(epoch.epoch, epoch.train, epoch.validation, epoch.test) for epoch in trained.result.epochs]


def first_and_slow(first, *others):
    """Return values for `make test`, and more for `make test-all`; a tuple has a value for each argument."""
    return [
        first,
        *(pytest.param(*(one if isinstance(one, tuple) else (one,)), marks=pytest.mark.slow) for one in others),
    ]
