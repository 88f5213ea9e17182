"""The life of a rank from start to end, whoever started its process."""

import inspect
import os
from collections.abc import Callable
from functools import partial

import torch
from torch import distributed

from flyte_ddp.code.user_code import checked_imports
from flyte_ddp.engine.arithmetic import settle_arithmetic
from flyte_ddp.engine.audit import Audit
from flyte_ddp.engine.batches.block_cache import BlockCache
from flyte_ddp.engine.batches.lengths import get_lengths
from flyte_ddp.engine.best_models import BestModels
from flyte_ddp.engine.checkpoints.checkpoint import check_readable
from flyte_ddp.engine.checkpoints.resume import resume
from flyte_ddp.engine.checkpoints.same_training import check_same_training
from flyte_ddp.engine.checkpoints.writer import make_checkpoints
from flyte_ddp.engine.compiler_compat import defer_dynamo_import
from flyte_ddp.engine.contracts import Plan
from flyte_ddp.engine.drift import Drift
from flyte_ddp.engine.evaluations import evaluate_test
from flyte_ddp.engine.job import Job, TrainingResult
from flyte_ddp.engine.load import load_named
from flyte_ddp.engine.loop import fit
from flyte_ddp.engine.monitor.profile import profiling
from flyte_ddp.engine.monitor.trace import make_trace
from flyte_ddp.engine.network.compiled import compile_now
from flyte_ddp.engine.network.memory import choose_micro_batch
from flyte_ddp.engine.own_loop.rank import run as run_own_loop
from flyte_ddp.engine.results import write_last, write_results, write_weights
from flyte_ddp.engine.set_up import SetUp, set_up
from flyte_ddp.engine.sharding.sharding import is_sharded
from flyte_ddp.engine.virtual_ranks.exact_step import ExactStep
from flyte_ddp.events import Event, StartUp, forward_to_all
from flyte_ddp.launch.environment import Environment
from flyte_ddp.launch.link import Link
from flyte_ddp.launch.phases import WRITING
from flyte_ddp.launch.process_group import process_group
from flyte_ddp.settings import TrainingSettings


def run(environment: Environment, link: Link, job: Job) -> TrainingResult:
    """Join the process group, train as one of its ranks, leave the group, and return the result.

    Our launcher calls this in each process that it has started.
    """
    with process_group(environment, job.options) as device:
        return train(environment, device, link, job)


def train(environment: Environment, device: torch.device, link: Link, job: Job) -> TrainingResult:
    """Train what the job names, a recipe or a user's own loop, as one rank of the process group; a collective.

    If there is a checkpoint of the job, the training goes on from it. Rank 0 writes the weights to job.model_path. The
    process group must exist.

    Returns:
        The result of the training, as this rank knows it.

    Raises:
        InputError: Ranks have different jobs, or the recipe or loop, its settings or its data are invalid.
        NonFiniteError: A loss or gradient is not finite.
        StopRequested: A rank was asked to stop; a checkpoint was written, if one could be.
        WrongBitsError: Ranks with the same hardware have computed different bits.
        RecoverableError: A host differs from the others, and options.odd_hosts is "refuse"; or the checkpoint, or
            the platform's storage, cannot be read now.
    """
    configure_process(environment, job)
    check_same_training(environment, job)
    named = load_named(job)
    if inspect.isfunction(named):
        return run_own_loop(named, environment, device, link, job)
    with BlockCache(environment, job.options.cache_bytes) as cache:
        return _train(environment, device, link, job, cache)


def configure_process(environment: Environment, job: Job) -> None:
    """Configure torch and memory in this process, before anything is computed.

    TF32 is turned off, and operations are deterministic where torch has a deterministic version. With virtual ranks,
    torch's fast path for attention is off, too. glibc keeps freed memory. Unless the job compiles, a stand-in replaces
    torch._dynamo, whose import takes long. The number of threads is settings.threads or, if that is 0, 1 with virtual
    ranks and environment.threads without them.
    """
    if not job.options.compile:
        defer_dynamo_import()
    keep_freed_memory()
    settle_arithmetic()
    if job.settings.virtual_ranks:  # torch evaluates encoder layers by other kernels, unless they are sharded
        torch.backends.mha.set_fastpath_enabled(False)
    torch.set_num_threads(job.settings.threads or (1 if job.settings.virtual_ranks else environment.threads))


def _train(environment: Environment, device: torch.device, link: Link, job: Job, cache: BlockCache) -> TrainingResult:
    """Set up the job's recipe, resume a checkpoint if there is one, train, and write the results; a collective.

    If the checkpoint was trained in another precision, or restoring it has failed half-way, the recipe is set up once
    more. The errors are those of train().
    """
    link.emit(StartUp("reading the recipe and its data"))
    with checked_imports(job.root, job.files):
        setup = set_up(environment, device, job, cache, link=link)
    link.emit(StartUp("looking for a checkpoint"))
    check_readable(setup.state.state_dict())
    other = resume(setup.state, job, environment, link)
    if other:
        del setup
        setup = set_up(environment, device, job, cache, other, link)
        setup.remarks.append(f"precision: {other}, which the checkpoint has been trained in")
        other = resume(setup.state, job, environment, link)
    if other is not None:
        del setup  # its memory is needed again
        setup = set_up(environment, device, job, cache, link=link)
    state = setup.state
    settings = job.settings
    if state.recipe.micro_batch < 0:
        link.emit(StartUp("trying how large a micro-batch fits"))
        setup.remarks.append(choose_micro_batch(state, setup.train))
    if job.options.compile:
        link.emit(StartUp("compiling"))
        compile_now(state, setup.train, setup.validation or setup.test, link)
    progress = state.progress
    progress.start(environment, job, make_plan(setup, settings), state.model)
    progress.emit_all(setup.warnings)
    if device.type == "cuda":  # without what the trials have taken
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)
    places = progress.places
    state.drift = Drift(places, device, progress.warn) if len(places) > 1 else None
    # Otherwise a part may have other bits each time, or needs all ranks
    if isinstance(state.parallel, ExactStep) and not is_sharded(state.model):
        state.audit = Audit(state.parallel, setup.train, job.options.audit_every, places, progress.warn)
    state.trace = make_trace(environment, device, job, progress.epoch + progress.step > 0)
    emit: Callable[[Event], None] = link.emit
    if job.options.keep_best:
        state.best_models = BestModels(state, job, emit, partial(write_weights, setup, job))
        emit = forward_to_all(state.best_models, emit)
    progress.checkpoints = make_checkpoints(state, environment, emit, job)
    profile = os.path.join(job.logs, "profile") if job.options.profile and job.logs else ""
    with progress.ending_together(), profiling(profile, environment.rank, state.optimizer):
        tested = fit(state, setup.train, setup.validation or setup.test, settings, link)
    write_last(setup, job)
    if setup.validation or tested is None:  # None: resumed after the last epoch
        distributed.barrier()  # ranks that waited for rank 0's files during the evaluation would be taken for hanging
        tested = evaluate_test(state, setup.test, settings.last_epoch, link)
    link.heartbeat(WRITING)
    digest = write_results(setup, tested, job)
    tracker = state.best_tracker
    chosen_epoch = tracker.best if tracker and tracker.best >= 0 else None
    published = state.best_models.publish() if state.best_models else []
    return progress.result(state.model, digest, tested.measures, chosen_epoch=chosen_epoch, kept=published)


def make_plan(setup: SetUp, settings: TrainingSettings) -> Plan:
    """Return the Plan of a recipe's training: the numbers, names and remarks that are reported at its start."""
    recipe = setup.state.recipe
    return Plan(
        headline=setup.probed.headline,
        percent=recipe.percent,
        lower_is_better=recipe.lower_is_better,
        precision=setup.precision,
        epochs=settings.last_epoch,
        steps_per_epoch=len(setup.train),
        samples_per_epoch=setup.train.samples,
        train_samples=len(setup.train.split),
        validation_samples=len(setup.validation.split) if setup.validation else 0,
        test_samples=len(setup.test.split),
        samples=recipe.samples,
        may_end_early=settings.patience > 0,
        sample_flops=setup.probed.sample_flops,
        remarks=setup.remarks,
        slow_data=setup.train.split.remedy,
        meets_within=is_sharded(setup.state.model),
        count_tokens=setup.train.count_tokens if get_lengths(setup.train.split) else None,
    )


def keep_freed_memory() -> None:
    """Make glibc keep freed memory for the next step, instead of returning it to the kernel page by page.

    glibc then keeps up to about 62 MiB free. Otherwise a step of mnist_cnn has 1,000 to 2,000 page faults, which take a
    tenth of its time. Without glibc it has no effect.
    """
    # glibc allocates blocks up to the size of a freed one on the heap, and keeps up to twice as much of it free
    # (mallopt(3), M_MMAP_THRESHOLD)
    torch.empty(31 << 20, dtype=torch.uint8)  # bytes; the threshold grows to 32 MiB at most
