"""One rank that evaluates what a training hands over, from start to end: see mailbox.py."""

import tempfile
import time
from contextlib import nullcontext
from inspect import isfunction

from torch import distributed

from flyte_ddp.code.user_code import checked_imports
from flyte_ddp.engine.batches.block_cache import BlockCache
from flyte_ddp.engine.checks.data_probe import of_first_rank, on_any_rank
from flyte_ddp.engine.elsewhere import POLL_SECONDS, SILENT_SECONDS
from flyte_ddp.engine.evaluations import evaluate
from flyte_ddp.engine.job import Job
from flyte_ddp.engine.load import load_named
from flyte_ddp.engine.mailbox import ENDED, EVALUATOR, FAILURES, Mailbox
from flyte_ddp.engine.set_up import SetUp, set_up
from flyte_ddp.engine.worker import settle_process
from flyte_ddp.errors import InputError, RecoverableError
from flyte_ddp.events import StartUp
from flyte_ddp.launch.environment import Environment
from flyte_ddp.launch.link import Link
from flyte_ddp.launch.process_group import process_group
from flyte_ddp.text import reason_of


def run(environment: Environment, link: Link, job: Job) -> int:
    """Evaluates until the training has ended, or has not been heard of for options.start_timeout_seconds; returns how
    often. Raises InputError for a place that cannot be used."""
    with process_group(environment, job.options) as device:
        mailbox = Mailbox(job.options.evaluate_elsewhere, job.key, EVALUATOR, job.storage_options)
        with mailbox.beating() if environment.rank == 0 else nullcontext(), BlockCache(environment) as cache:
            settle_process(environment, job)
            if isfunction(load_named(job)):
                raise InputError(f"{job.recipe} must be a recipe, got a loop of your own, which evaluates by itself")
            link.emit(StartUp("reading the recipe and its data"))
            with checked_imports(job.root, job.files):
                setup = set_up(environment, device, job, cache, link=link)
            link.emit(StartUp("waiting for weights of the training"))
            return _evaluate_all(setup, mailbox, job, link)


def _evaluate_all(setup: SetUp, mailbox: Mailbox, job: Job, link: Link) -> int:
    state, split, count = setup.state, setup.validation or setup.test, 0
    requests = Requests(mailbox, job)
    while True:
        asked = of_first_rank(requests.oldest() if distributed.get_rank() == 0 else None)
        if asked is None:
            return count
        link.heartbeat()
        if not asked:
            time.sleep(POLL_SECONDS)
            continue
        weights = None
        try:
            weights = mailbox.weights(asked)
        except FAILURES as error:  # the training may have taken them back
            requests.check_patience(asked, error)
        if any(on_any_rank([weights is None], state.device)):
            time.sleep(POLL_SECONDS)
            continue
        assert weights is not None
        state.load_weights(state.evaluated, weights)
        if state.digest() != asked.partition("-")[2]:
            raise InputError(
                "the network must have the same weights here as in the training, but what model() freezes differs: "
                "let it make them alike in each process"
            )
        found = evaluate(state, split, link)
        count += 1
        if distributed.get_rank() == 0:
            try:
                mailbox.answer(asked, {name: value for name, value in found._asdict().items() if name != "predictions"})
            except FAILURES as error:  # what has no answer is evaluated again
                requests.check_patience(asked, error)
            measures = ", ".join(f"{measure} {value:.4g}" for measure, value in found.measures.items())
            print(f"evaluation {int(asked.partition('-')[0]) + 1}: {measures}", flush=True)


class Requests:
    """What the training asks for, as the evaluator sees it, and how long what fails is tried again."""

    def __init__(self, mailbox: Mailbox, job: Job):
        self._mailbox, self._job = mailbox, job
        self._failing: dict[str, float] = {}  # since when, by evaluation
        self._is_under_way = False  # else ENDED, if it is there, is an earlier training's of the same

    def check_patience(self, asked: str, error: Exception) -> None:
        """Raises RecoverableError if it has failed for so long that the training, which hears this evaluator, should go
        on without it."""
        seconds = time.monotonic() - self._failing.setdefault(asked, time.monotonic())
        if seconds > SILENT_SECONDS:
            raise RecoverableError(
                f"evaluation {int(asked.partition('-')[0]) + 1} could not be fetched, or answered, for {seconds:.0f} "
                f"s: {reason_of(error)}: free or allow space in evaluate_elsewhere and in {tempfile.gettempdir()} "
                "(TMPDIR), and start it again"
            ) from None

    def oldest(self) -> str | None:
        """The first evaluation that is still asked for; "" if none is yet, None if none will be."""
        options = self._job.options
        try:
            files = self._mailbox.files()
            names = (file.removesuffix(".pt") for file in files if file.endswith(".pt"))
            asked = next((name for name in names if f"{name}.json" not in files), "")
            silent = self._mailbox.seconds_silent()
        except InputError:
            raise
        except FAILURES:  # the next look may find the storage well
            return ""
        self._is_under_way |= bool(asked) or ENDED not in files
        if asked:
            return asked
        if ENDED in files and (self._is_under_way or silent > SILENT_SECONDS):
            print(f"the training has ended, as {options.evaluate_elsewhere} says", flush=True)
            return None
        if silent > options.start_timeout_seconds:
            print(
                f"the training has given no sign of life in {options.evaluate_elsewhere} for {silent:.0f} s, which is "
                "more than start_timeout_seconds: it has the same recipe, settings and data, or evaluates by itself",
                flush=True,
            )
            return None
        return ""
