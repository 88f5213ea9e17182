"""Training without Flyte: in a Python call, in a notebook, or as one of the ranks that torchrun starts.

    result = train("my_project.model:CharLM", Settings(epochs=3), output="trained")

In a script that `torchrun --nproc-per-node 2 script.py` runs, the same call trains as one of its ranks.
"""

import os
import pkgutil
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from inspect import isfunction
from pathlib import Path
from typing import Any

from flyte_ddp.code.user_code import EXAMPLE, UserCode, find_code, find_observers
from flyte_ddp.data.description import StoredData
from flyte_ddp.engine.job import (
    FINAL,
    LAST,
    OUTPUT,
    PICTURES,
    PREDICTIONS,
    Job,
    KeptModel,
    TrainingResult,
    job_in,
    make_subject,
)
from flyte_ddp.errors import InputError
from flyte_ddp.events import EpochFinished, Event, StartUp
from flyte_ddp.launch import launcher
from flyte_ddp.launch.environment import choose_world, is_first_rank
from flyte_ddp.launch.failures import PreemptedError
from flyte_ddp.lock import HeldError, held
from flyte_ddp.manifest import remove_checkpoint
from flyte_ddp.report.console import advise_resume, say, say_interrupted, say_summary, show_output
from flyte_ddp.report.goodput import Goodput
from flyte_ddp.report.observers import Observers
from flyte_ddp.report.progress import FILE, attempts_in
from flyte_ddp.report.record import RunFinished, RunInfo, tracking_id
from flyte_ddp.settings import RunOptions, TrainingSettings
from flyte_ddp.whole_files import absolute, remove_leftovers, writing_to

WORKER = "flyte_ddp.engine.worker:run"
JOINED = "flyte_ddp.engine.joined:join_and_train"


@dataclass(frozen=True)
class Result:
    """The outputs of a training without Flyte.

    Attributes:
        epochs: for each evaluation, the measures of the training samples since the last one, and of the validation or
            test samples as `evaluated`.
        warnings: when and why training did not go as it should; empty if all went well.
        model_path: the trained weights, a CPU state_dict, on the first node. With a validation split they are those of
            the best epoch, and last.pt beside it has those of the last.
        output: the folder of all files that were written, on the first node.
        tested: measures of the test samples, with the weights at model_path.
        best_epoch: the evaluation, one per epoch by default, of the weights at model_path, from 1; 0 without a
            validation split.
        kept: the models that options.keep_best has left in output, the best first.
        digest: the digest of the weights at model_path, 16 hex digits: equal bits have equal digests.
    """

    epochs: list[EpochFinished]
    warnings: list[str]
    model_path: Path
    output: Path
    tested: dict[str, float]
    best_epoch: int
    kept: list[KeptModel]
    digest: str


def train(
    recipe: str | type | Callable[..., None],
    settings: TrainingSettings,
    options: RunOptions = RunOptions(),  # noqa: B008 frozen
    data: str | Path | None = None,
    output: str | Path = "trained",
    data_files: Sequence[str] = (),
    on_event: Callable[[Event], None] | None = None,
    init: str | Path | None = None,
    observers: Sequence[str] = (),
    report: bool = False,
) -> Result:
    """Train a recipe with options.nproc ranks, or as one rank if a launcher has set WORLD_SIZE.

    If an interrupted call has left a checkpoint in `output`, the same call continues from the checkpoint. With
    options.resume off, the call removes the checkpoint and starts afresh. After a success, the checkpoint is removed. A
    training that has finished in `output` is replaced, and a line says so.

    Args:
        recipe: a class, or its name "package.module:Name"; or a function, a loop of your own, as Loop describes it.
        settings: what determines the result.
        options: how to run the training.
        data: a file or folder, passed to the recipe as data_path; or its URL (s3://, gs://, abfs://, file://), for a
            recipe that returns Blocks.
        output: the folder for model.pt, progress.jsonl, predictions.npy, pictures.npz and the checkpoint. A missing
            folder is created. Only one training uses the folder at a time.
        data_files: files that the recipe reads, relative to its module's file. If one of them changes, an earlier
            checkpoint is no longer valid.
        on_event: on_event(event) is called with every event. Without on_event, or with a report, lines are printed to
            standard error.
        init: what to start with: the model_state of an earlier training; a folder in save_pretrained's layout, which
            the recipe gets as init_path; or a checkpoint, from which training continues up to settings.epochs in
            total. A training with options.keep_checkpoint leaves one in its output, as final-checkpoint.
        observers: "package.module:Name" of classes with a method for each event that concerns them. Unlike on_event,
            they cannot hurt the run: they run in threads of their own, and an exception is only reported.
        report: whether `output` also gets report.html, which is updated while the run trains, and whether
            options.tracking chooses a tracker.

    Returns:
        The history of evaluations, the paths of the weights and of `output`, and the measures of the test samples.
        Under a launcher every rank returns them.

    Raises:
        InputError: The caller can fix the error. For instance, another process trains into `output`, or `output` has
            the checkpoint of another training.
        RankError: A rank has failed. Under a launcher, this rank's own errors are raised as they are instead.
        PreemptedError: The process has received a SIGTERM.
        KeyboardInterrupt: The user has pressed Ctrl-C.
    """
    show_output()
    if not isinstance(settings, TrainingSettings):
        raise InputError(f"settings must be an object of TrainingSettings or a subclass, got {settings!r}")
    if not isinstance(options, RunOptions):
        raise InputError(f"options must be an object of RunOptions, got {options!r}")
    if not (isinstance(recipe, (str, type)) or isfunction(recipe)):
        raise InputError(f"recipe must be a name such as {EXAMPLE}, or the class or function itself, got {recipe!r}")
    code = find_code(recipe if isinstance(recipe, str) else find_import_name(recipe), data_files)
    if not report and options.tracking not in ("auto", "off"):
        raise InputError(
            f"RunOptions.tracking must be auto or off without a report, got {options.tracking}: give train report=True"
        )
    if "://" in str(output):
        raise InputError(
            f"output must be a folder of this machine, got {output}: copy it to the storage later, or train in a task"
        )
    watching = find_observers(observers)
    source = locate_data(data)
    first = absolute(init, "init") if init else None
    if first and not first.exists():
        raise InputError(f"init must be a file or folder that is there, got {first}")
    subject = make_subject(code, settings, source, first)
    folder = absolute(output, OUTPUT)
    if first and first.is_file() and first.parent.resolve() == folder.resolve():
        raise InputError(
            f"init must not be in output, whose files the training replaces, got {first}: give another output"
        )
    with writing_to(folder, OUTPUT):
        folder.mkdir(parents=True, exist_ok=True)
    if options.resume_from:
        raise InputError(
            f"RunOptions.resume_from is for Flyte's executions, got {options.resume_from}: train() resumes from the "
            "checkpoint in its output folder"
        )
    job = job_in(folder, subject, options)
    with locked_output(folder) if is_first_rank() else nullcontext():
        return run_in(folder, job, watching, on_event, report)


@contextmanager
def locked_output(folder: Path) -> Iterator[None]:
    """Keep other processes from training into the folder while the block runs, by a lock; a context manager.

    If the folder's file system has no locks, nothing keeps other processes out.

    Raises:
        InputError: another process trains into the folder, or the folder cannot be written to.
    """
    with ExitStack() as stack:
        with writing_to(folder, OUTPUT):
            try:
                stack.enter_context(held(folder))
            except HeldError as holder:
                raise InputError(
                    f"output must be a folder that nobody else trains into, got {folder}, which is in use by {holder}: "
                    "give another output, or wait until that one has ended"
                ) from None
        yield


def run_in(
    folder: Path,
    job: Job,
    watching: Sequence[UserCode],
    on_event: Callable[[Event], None] | None = None,
    report: bool = False,
) -> Result:
    """Run a job whose files are all in one folder, pass its events to the observers, and return its outputs.

    Before, lock the folder by locked_output(), and make the job by job_in(). Under a launcher, every rank calls this
    function, but the first rank alone locks the folder and removes files.

    If an earlier attempt has left a checkpoint in the folder, the job continues from the checkpoint; without
    options.resume, the checkpoint is removed instead. After a success, the checkpoint is removed. Temporary files that
    killed processes have left in the folder are removed first.

    Args:
        folder: the folder.
        job: the job.
        watching: the user's observers.
        on_event: on_event(event) is called with every event.
        report: whether to write report.html, and to use a tracker.

    Raises:
        InputError: The caller can fix the error.
        RankError: A rank has failed. Under a launcher, this rank's own errors are raised as they are instead.
        PreemptedError: The process has received a SIGTERM.
        KeyboardInterrupt: The user has pressed Ctrl-C.
    """
    started = time.time()
    earlier = attempts_in(folder / FILE) if Path(job.checkpoint_path).exists() and job.options.resume else []
    goodput = Goodput(started, earlier=earlier)
    is_first = is_first_rank()
    if is_first and Path(job.model_path).exists() and not Path(job.checkpoint_path).exists():
        say(f"Replaces the training that has finished in {folder}")
    if is_first:  # a killed process may have left drafts, each as large as a checkpoint
        for file in (job.checkpoint_path, job.model_path, FILE, PREDICTIONS, PICTURES, LAST, FINAL):
            remove_leftovers(folder, Path(file).name)
    page = folder / "report.html" if report and is_first else None
    with Observers(
        describe_run(folder, job, goodput), goodput, own=watching, page=page, on_event=on_event
    ) as observers:
        if is_first:
            observers(StartUp("importing torch"))
        results = run_job(job, observers)
        goodput.wait(time.time())
        observers.end(RunFinished.of(results, folder, goodput))
        if page:
            say_summary(observers.record, Path(job.model_path), page, show_paths=True)
        if is_first:  # with the checkpoint, the same command would only report the finished training again
            remove_checkpoint(Path(job.checkpoint_path))
    result = results[0]
    warnings = [one.reason for one in result.warnings]
    best_epoch = 0 if result.chosen_epoch is None else result.chosen_epoch + 1
    return Result(
        result.epochs, warnings, Path(job.model_path), folder, result.tested, best_epoch, result.kept, result.digest
    )


def describe_run(folder: Path, job: Job, goodput: Goodput) -> RunInfo:
    """Return what observers know of a run before it starts. All files of the run are in one folder.

    Args:
        folder: the folder. The run gets the name of the folder.
        job: the run.
        goodput: all attempts so far, with this one. The tracker's run has the same id in all attempts, because the id
            depends on when the first attempt began.
    """
    return RunInfo(
        name=folder.name,
        recipe=job.recipe,
        tracking_id=tracking_id(job.key, f"{folder}/{goodput.attempts[0].began}"),
        attempt=0,
        settings=job.settings,
        options=job.options,
        data=None,
        description=None,
        logs=folder,
        checkpoint=str(folder),
    )


def locate_data(data: str | Path | None) -> Path | StoredData | None:
    """Return the absolute path of the data, or for a URL a StoredData; None without data.

    A StoredData has the URL and a hash of what is stored there.

    Raises:
        InputError: There are no data at this path or URL.
    """
    if isinstance(data, str) and "://" in data:
        from flyte_ddp.data.remote_files import stored_data  # remote_files imports fsspec, which local data don't need

        return stored_data(data)
    source = absolute(data, "data") if data else None
    if source and not source.exists():
        raise InputError(f"data must be an existing file or folder, got {source}")
    return source


def run_job(job: Job, on_event: Callable[[Event], None]) -> list[TrainingResult]:
    """Train with ranks that this process starts or, if a launcher has set WORLD_SIZE, as one of the launcher's ranks.

    Args:
        job: the job. Without options.resume, a checkpoint at job.checkpoint_path is removed first.
        on_event: on_event(event) is called with each event of rank 0. Under a launcher, only the process of rank 0
            calls it. Otherwise, this process calls it, and also with each line that a rank prints (Printed).

    Returns:
        The results of all ranks, by rank. Under a launcher, the list has this rank's result alone.

    Raises:
        InputError: nproc or the settings' class cannot be used, or a rank has raised an InputError.
        RankError: A rank has failed or hangs. Under a launcher, this rank's own errors are raised as they are instead.
        PreemptedError: A signal has asked the training to stop. If this host has a checkpoint, the message names it.
        KeyboardInterrupt: The user has pressed Ctrl-C.
    """
    checkpoint = Path(job.checkpoint_path)
    options = job.options
    if is_first_rank() and not options.resume:
        remove_checkpoint(checkpoint)
    try:
        if "WORLD_SIZE" in os.environ:
            size = os.environ.get("LOCAL_WORLD_SIZE", "1")
            if options.nproc and str(options.nproc) != size:
                raise InputError(
                    f"nproc must be 0 where a launcher has started {size} on this host, as WORLD_SIZE="
                    f"{os.environ['WORLD_SIZE']} says, got {options.nproc}: leave it out, or unset WORLD_SIZE"
                )
            results = [pkgutil.resolve_name(JOINED)(job, on_event)]
        else:
            settings = job.settings
            find_import_name(type(settings), "settings")
            world = choose_world(settings.backend, options.nproc, settings.batch_size, settings.virtual_ranks)
            results = launcher.launch(WORKER, world, job, options, on_event, root=job.root)
    except PreemptedError as stopped:
        if not checkpoint.exists():  # the training was stopped before its first step
            raise
        raise PreemptedError(f"{stopped}; {advise_resume(checkpoint, options.resume)}") from None
    except KeyboardInterrupt:
        say_interrupted(checkpoint, options.resume)
        raise
    return results


def find_import_name(kind: Any, what: str = "recipe") -> str:
    """Return the name "module:qualified name" by which ranks can import the class or function.

    Args:
        kind: the class or function.
        what: what the message calls it.

    Raises:
        InputError: ranks cannot import it, because it is defined in __main__ or within a function.
    """
    if kind.__module__ == "__main__" or "<locals>" in kind.__qualname__:
        raise InputError(
            f"{what} must be defined at the top level of a module that can be imported, got {kind.__qualname__} of "
            f"{kind.__module__}: put it into a file of its own, which each rank imports"
        )
    return f"{kind.__module__}:{kind.__qualname__}"
