"""What a training run says on the terminal or in a pod's log."""

import click

from workflows.training.events import (
    CheckpointFailed,
    CheckpointRefused,
    EpochFinished,
    Event,
    RunStarted,
    StepLogged,
)


def say(text: str) -> None:
    click.echo(text, err=True)  # standard output is the workflow's own: its result


class Console:
    """Prints a line per logged step and per epoch, in the tutorial's manner."""

    def __init__(self) -> None:
        self._run: RunStarted

    def __call__(self, event: Event) -> None:
        if isinstance(event, RunStarted):
            self._run = event
            say(
                f"{event.dataset}: {event.train_samples:,} training and {event.test_samples:,} test images; "
                f"{event.world_size} ranks ({event.backend}, {event.device}, {event.precision}), "
                f"ready after {event.startup_seconds:.1f} s"
            )
            if event.first_epoch or event.first_step:
                say(f"going on from the checkpoint: epoch {event.first_epoch + 1}, step {event.first_step + 1}")
        elif isinstance(event, StepLogged):
            share = event.step / self._run.steps_per_epoch
            say(
                f"Train Epoch: {event.epoch + 1} [{event.samples}/{self._run.train_samples} ({share:.0%})]"
                f"\tLoss: {event.loss:.6f}"
            )
        elif isinstance(event, EpochFinished):
            say(
                f"Epoch {event.epoch + 1} of {self._run.epochs}: test accuracy {event.accuracy:.2%}, "
                f"test loss {event.test_loss:.4f}, {event.train_seconds:.1f} s of training"
            )
        elif isinstance(event, CheckpointFailed):
            say(f"Warning: no checkpoint could be written: {event.reason}")
        elif isinstance(event, CheckpointRefused):
            say(f"Starting afresh: {event.reason}")
