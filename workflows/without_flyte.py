"""The training of workflows/mnist.py without Flyte: as one process, or as the ranks that torchrun starts.

\b
python -m workflows.without_flyte --output OUT --hp '{"epochs": 1}'
torchrun --nproc-per-node 2 -m workflows.without_flyte --output OUT
torchrun --nnodes 2 --nproc-per-node 2 --rdzv-backend c10d --rdzv-endpoint HOST:29500 -m workflows.without_flyte

Others than torchrun set RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT, and where a node has several ranks also
LOCAL_RANK and LOCAL_WORLD_SIZE.
"""

import json
import os
import signal
import tempfile
import time
from contextlib import contextmanager
from pathlib import Path
from typing import Iterator

import click
from torch import distributed
from torch.distributed.elastic.multiprocessing.errors import record

from flyte_ddp.observers.console import Console, download_progress, say
from flyte_ddp.training import datasets, prepared, worker
from flyte_ddp.training.code_version import code_version
from flyte_ddp.training.direct_link import DirectLink
from flyte_ddp.training.environment import Environment, choose_world, environment_from_variables, threads_per_rank
from flyte_ddp.training.errors import InputError, ReportedError, StopRequested
from flyte_ddp.training.hyperparameters import Hyperparameters, RunOptions
from flyte_ddp.training.job import Identity, Job, TrainingResult
from flyte_ddp.training.process_group import process_group
from flyte_ddp.training.reading import read_settings
from flyte_ddp.training.storage import writing_to

OPTIONS = ("checkpoint_seconds", "profile", "resume", "timeout_seconds")


@click.command(help=__doc__)
@click.option("--hp", default="{}", help="Hyperparameters, in part or whole: JSON, or a .json or .yaml file.")
@click.option("--options", default="{}", help=f"Of RunOptions {', '.join(OPTIONS)}, likewise.")
@click.option(
    "--output",
    default="without-flyte",
    type=click.Path(path_type=Path),
    help="The folder, on the first node, for model.pt, predictions.npy, and the checkpoint that the same command goes "
    "on from.",
)
@record  # so that torchrun's report has the error of the rank that failed first
def main(hp: str, options: str, output: Path) -> None:
    chosen = Hyperparameters.from_dict(read_settings(hp))
    with own_environment(chosen) as environment:
        result = train(environment, chosen, read_options(options), output.absolute())
    if environment.rank == 0:
        accuracies = [epoch.accuracy for epoch in result.epochs]
        click.echo(json.dumps({"epoch_accuracies": accuracies, "model_state": str(output.absolute() / "model.pt")}))


def read_options(text: str) -> RunOptions:
    """Raises InputError for what has no meaning without Flyte's parent of the ranks."""
    given = read_settings(text)
    options = RunOptions.from_dict(given)
    others = sorted(set(given) - set(OPTIONS))
    if others:
        raise InputError(
            f"options must be of {', '.join(OPTIONS)} here, got {', '.join(others)}: torchrun's --nproc-per-node says "
            "how many ranks there are, and trackers and the report come with pyflyte"
        )
    return options


@contextmanager
def own_environment(hp: Hyperparameters) -> Iterator[Environment]:
    """This process's place in the world that its starter tells of, or alone in one of its own."""
    if "WORLD_SIZE" in os.environ:
        environment = environment_from_variables(hp.backend)
        size = environment.world.size
        if hp.batch_size < size:
            raise InputError(f"batch_size must be at least the number of ranks ({size}), got {hp.batch_size}: raise it")
        yield environment
        return
    with tempfile.TemporaryDirectory(prefix="ddp-") as private:
        world = choose_world(hp.backend, 1, hp.batch_size)
        yield Environment(world, 0, 0, f"file://{private}/rendezvous", threads_per_rank(1))


def train(environment: Environment, hp: Hyperparameters, options: RunOptions, output: Path) -> TrainingResult:
    """Trains as this rank; rank 0 leaves the weights in output, and says what happens."""
    launched, checkpoint = time.time(), output / "checkpoint"
    link = DirectLink(Console() if environment.rank == 0 else lambda event: None)
    with process_group(environment, options.timeout_seconds) as device:
        data = prepare(environment, hp.dataset)
        if environment.rank == 0:
            with writing_to(output, "--output"):
                output.mkdir(parents=True, exist_ok=True)
                if not options.resume:
                    checkpoint.unlink(missing_ok=True)
        job = Job(
            identity=Identity(hp, prepared.read_description(data).digest, own_code()),
            data=str(data),
            model_path=str(output / "model.pt"),
            predictions_path=str(output / "predictions.npy"),
            checkpoint_path=str(checkpoint),
            checkpoint_seconds=options.checkpoint_seconds,
            timeout_seconds=options.timeout_seconds,
            launched=launched,
            profile_path=str(output / "profile") if options.profile else "",
        )
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, link.on_signal)
        try:
            result = worker.train(environment, device, link, job)
        except StopRequested as stopped:
            raise ReportedError(f"{stopped}; the same command goes on from {checkpoint}") from None
    if environment.rank == 0:
        checkpoint.unlink(missing_ok=True)
        say(f"Model: {job.model_path}")
    return result


def prepare(environment: Environment, name: str) -> Path:
    """The prepared dataset, for which the first rank of each node sees to it, while the others wait. There is no
    stand-in: the nodes might choose different ones."""
    name = "mnist" if name == "auto" else name
    if environment.local_rank == 0:
        with download_progress() as progress:
            datasets.prepare(name, progress)
    distributed.barrier()
    return datasets.prepared_dir(name)


def own_code() -> str:
    """Of all that the ranks may import: a checkpoint is gone on from by the same code alone."""
    files = sorted(Path(datasets.__file__).parent.glob("*.py"))
    return code_version([f"flyte_ddp/training/{file.name}" for file in files], ["torch"])


if __name__ == "__main__":
    main()
