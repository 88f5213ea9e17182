"""Evaluations that another process computes while the training goes on: see evaluator.py."""

import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import asdict
from typing import Any, NamedTuple

import torch
from torch import Tensor, distributed

from flyte_ddp.engine.checks.data_probe import of_first_rank, on_any_rank
from flyte_ddp.engine.job import Job
from flyte_ddp.engine.mailbox import FAILURES, TRAINING, Mailbox
from flyte_ddp.errors import StopRequested
from flyte_ddp.events import EpochFinished
from flyte_ddp.launch.link import Link

POLL_SECONDS = 1.0
SILENT_SECONDS = 60.0  # after which an evaluator is taken for gone


class Awaited(NamedTuple):
    """An evaluation that is computed elsewhere.

    Attributes:
        number: of the evaluation, from 0.
        trained: with what is known of it.
        weights: a copy on the host, without those that model() freezes.
    """

    number: int
    trained: EpochFinished
    weights: dict[str, Tensor]

    @property
    def name(self) -> str:
        return f"{self.number:06}-{self.trained.digest}"

    def state_dict(self) -> dict[str, Any]:
        return {**self._asdict(), "trained": asdict(self.trained)}

    @classmethod
    def of(cls, saved: Mapping[str, Any]) -> "Awaited":
        return cls(saved["number"], EpochFinished(**saved["trained"]), saved["weights"])


class Elsewhere:
    """The training's side. All methods are collectives, in which rank 0 asks the storage."""

    def __init__(self, mailbox: Mailbox | None, device: torch.device):
        """mailbox: on rank 0."""
        self._mailbox, self._device = mailbox, device
        self._problem = ""
        self._writer: threading.Thread | None = None

    def hand_over(self, awaited: Awaited) -> None:
        """Writes in a thread, beside the training."""

        def write(mailbox: Mailbox) -> None:
            try:
                mailbox.hand_over(awaited.name, awaited.weights)
            except FAILURES as error:
                self._problem = str(error)

        if self._mailbox:
            self._writer = threading.Thread(target=write, args=(self._mailbox,), daemon=True)
            self._writer.start()

    def take(self, awaited: Awaited, link: Link, epoch: int, step: int) -> tuple[dict[str, Any] | None, str]:
        """Waits for what was found; none, and why, if nobody evaluates. Raises StopRequested."""
        while True:
            found = of_first_rank(self._look(self._mailbox, awaited) if self._mailbox else None)
            if found is not None:
                return found
            if any(on_any_rank([link.stop_requested], self._device)):
                raise StopRequested(epoch, step)
            link.heartbeat()
            time.sleep(POLL_SECONDS)

    def _look(self, mailbox: Mailbox, awaited: Awaited) -> tuple[dict[str, Any] | None, str] | None:
        """None: look again."""
        if self._writer and self._writer.is_alive():
            return None
        (problem, self._problem), found, name = (self._problem, ""), None, awaited.name
        try:
            files, silent = mailbox.files(), mailbox.seconds_silent()
            if f"{name}.json" in files:
                found = mailbox.read_answer(name)
            elif silent > SILENT_SECONDS:
                problem = (
                    f"no evaluator has given a sign of life for {silent:.0f} s: start "
                    "`python -m flyte_ddp evaluate` with the same recipe, settings, data and evaluate_elsewhere"
                )
            elif not problem and f"{name}.pt" not in files:  # somebody has removed it
                mailbox.hand_over(name, awaited.weights)
            if found or problem:
                mailbox.clear(name)
        except FAILURES as error:
            found, problem = None, str(error)
        return (found, problem) if found or problem else None


@contextmanager
def elsewhere_of(job: Job, device: torch.device) -> Iterator[Elsewhere | None]:
    """What options.evaluate_elsewhere asks for; the evaluator ends with the block, unless that fails."""
    place = job.options.evaluate_elsewhere
    mailbox = Mailbox(place, job.key, TRAINING, job.storage_options) if place and distributed.get_rank() == 0 else None
    with mailbox.beating() if mailbox else nullcontext():
        if mailbox:
            mailbox.begin()
        yield Elsewhere(mailbox, device) if place else None
        with suppress(*FAILURES):  # the evaluator ends later, then
            if mailbox:
                mailbox.end()
