"""A rank that runs a loop of the user's own, from start to end."""

import inspect
import re
from collections.abc import Callable
from pathlib import Path

import torch
from torch import distributed
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from flyte_ddp.engine.batches.block_cache import BlockCache
from flyte_ddp.engine.code_location import find_line
from flyte_ddp.engine.job import Job, TrainingResult
from flyte_ddp.engine.own_loop.agreement import Call
from flyte_ddp.engine.own_loop.loop import Loop
from flyte_ddp.engine.own_loop.state import LoopState
from flyte_ddp.engine.own_loop.unsaved import Unsaved
from flyte_ddp.engine.results import export_model, remove_earlier
from flyte_ddp.engine.virtual_ranks.rules import check_settings
from flyte_ddp.errors import InputError
from flyte_ddp.events import EpochChosen, StartUp
from flyte_ddp.launch.environment import Environment
from flyte_ddp.launch.link import Link
from flyte_ddp.settings import RunOptions, TrainingSettings
from flyte_ddp.whole_files import writing_to

# What a loop decides for itself, or cannot have: set to anything else, it would have no effect
UNUSED: dict[type, tuple[str, ...]] = {
    TrainingSettings: (
        "stop_after", "evaluations_per_epoch", "validation_fraction", "choose_by", "freeze", "init_leave_out",
        "skip_spikes",
    ),
    RunOptions: (
        "profile", "log_gradients", "keep_checkpoint", "sharding", "compile",
    ),
}  # fmt: skip

UNMEASURED = (
    "the loop has returned within an epoch, so no measures are those of the weights that it returns: call "
    "loop.evaluated before, also where the epoch is left early"
)
ALREADY = "the ranks are a process group before the loop is called, and until its weights are written"


def run(
    function: Callable[[Loop], None], environment: Environment, device: torch.device, link: Link, job: Job
) -> TrainingResult:
    """Call the user's training function on this rank, and return the result of the training; a collective.

    The process group must exist already. Rank 0 writes the weights to job.model_path. While the function runs, hooks of
    torch check the steps of each optimizer of this process. The message of an InputError begins with the line of the
    user's code that has led to it. Other errors of the function are raised unchanged.

    Args:
        function: the user's function, which is given the Loop.
        environment: this rank and its ranks.
        device: this rank's device.
        link: gets events, and says whether the rank is asked to stop.
        job: the job.

    Returns:
        The result of the training as this rank knows it.

    Raises:
        InputError: A setting or option is invalid, or is set although a loop of the user's own ignores it. Or the
            function does not take one argument, does not train in loop.epochs, calls a method of Loop with an argument
            that lacks its name, or creates or destroys the process group. Or rank 0 cannot write the weights.
        StopRequested: A rank was asked to stop; a checkpoint was written.
        NonFiniteError: A loss or weight is not finite.
        WrongBitsError: With virtual ranks, an audit has found ranks that compute other bits from the same samples.
        RecoverableError: A host differs from the others, and options.odd_hosts is "refuse".
    """
    for kind, given in ((TrainingSettings, job.settings), (RunOptions, job.options)):
        for name in UNUSED[kind]:
            value, default = getattr(given, name), getattr(kind(), name)
            if value != default:
                raise InputError(
                    f"{type(given).__name__}.{name} must be {default!r} for a loop of your own, which it would have no "
                    f"effect on, got {value!r}: leave it out, or write a recipe"
                )
    check_settings(job.settings, job.options, environment.world.size)
    try:
        inspect.signature(function).bind(None)
    except TypeError as error:
        raise InputError(f"{job.recipe} must take one argument, the loop, as in def train(loop): {error}") from None
    with BlockCache(environment, job.options.cache_bytes) as cache:
        state = LoopState(environment, device, link, job)
        hooks = [
            register_optimizer_step_pre_hook(state.before_optimizer),
            register_optimizer_step_post_hook(state.optimizers.stepped),
            register_optimizer_step_post_hook(Unsaved(state.parts).after_step),
        ]
        link.emit(StartUp("calling your loop, up to its first epoch"))
        try:
            with state.progress.ending_together():
                function(Loop(environment, state, link, job, cache))
                if not distributed.is_initialized():
                    raise InputError(f"leave out torch.distributed.destroy_process_group: {ALREADY}")
                state.agree(Call.END)
                return finish(state, environment, link, job)
        except InputError as error:
            raise InputError(f"{find_line(error)}{error.message}") from error
        except ValueError as error:
            if "default process group twice" not in str(error):  # torch's words
                raise
            raise InputError(f"{find_line(error)}leave out torch.distributed.init_process_group: {ALREADY}") from None
        except TypeError as error:
            if not re.match(r"Loop\.\w+\(\) takes .* were given", str(error)):  # Python's words
                raise
            raise InputError(
                f"{find_line(error)}{error}: give each with its name, as in loop.log(loss=loss) and "
                "loop.keep(model=model, optimizer=optimizer)"
            ) from None
        finally:
            for hook in hooks:
                hook.remove()


def finish(state: LoopState, environment: Environment, link: Link, job: Job) -> TrainingResult:
    """Write the weights and return the result, once the user's function has returned; a collective.

    The function may have left the loop over the epochs early. If the epoch under way was evaluated, it is ended as
    usual. Otherwise only its last step is ended, and a warning says that the last weights are unmeasured.

    A checkpoint that was put off is written. With loop.epochs(best=...), the best epoch's weights are loaded.
    EpochChosen is emitted with `best`, and after an evaluation that followed the last epoch. At last rank 0 writes the
    weights to job.model_path.

    Returns:
        The result as this rank knows it. Its test measures are those of an evaluation after the last epoch, or else of
        the epoch whose weights are returned.

    Raises:
        InputError: The function has not called loop.epochs, or an evaluation lacks the headline. Or the weights cannot
            be written, which rank 0 alone raises.
        NonFiniteError: A measure of a step, or a weight, is not finite.
    """
    progress = state.progress
    if not progress.started:
        raise InputError(f"{job.recipe} must train in `for epoch in loop.epochs():`, and has not called it")
    if state.evaluated:  # the loop over the epochs was left
        state.end_epoch(is_left=True)
    elif progress.step or state.logged:
        if state.logged:
            state.end_step(is_left=True)
        progress.check_steps(state)
        state.compare_between_ranks()
        if not (state.best_tracker and state.best_tracker.best >= 0):
            progress.warn_once(UNMEASURED)
    if progress.owes_checkpoint:
        progress.save(state, is_last=True)
    progress.close()
    tracker = state.best_tracker
    number = tracker.best if tracker else -1  # without a best epoch the last one
    if tracker and not state.is_over and progress.history:  # the loop over the epochs was left
        state.load_best_epoch()
    chosen_epoch = number if number >= 0 else None
    if progress.history and (tracker or state.tested):
        chosen = progress.history[number]
        event = EpochChosen(
            epoch=chosen.epoch,
            epochs=progress.epoch,
            measures=state.tested,
            stopped_early=progress.epoch < job.settings.epochs,
            seconds=0.0,
            is_best=chosen_epoch is not None,
            fraction=chosen.fraction,
        )
        link.emit(event)
    if environment.rank == 0:
        with writing_to(Path(job.model_path).parent, job.chosen_by):
            remove_earlier(job)
            export_model(state.evaluated_weights(), Path(job.model_path))
    tested = progress.history[number].test if progress.history else {}
    published = state.best_models.publish() if state.best_models else []
    return progress.result(
        state.parts["model"], state.digest(), state.tested or tested, chosen_epoch=chosen_epoch, kept=published
    )
