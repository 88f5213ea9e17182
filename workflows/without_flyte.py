"""The training of workflows/mnist.py without Flyte: as one process, or as the ranks that torchrun starts.

\b
python -m workflows.without_flyte --output OUT --hp '{"epochs": 1}'
torchrun --nproc-per-node 2 -m workflows.without_flyte --output OUT
torchrun --nnodes 2 --nproc-per-node 2 --rdzv-backend c10d --rdzv-endpoint HOST:29500 -m workflows.without_flyte

Other launchers must set RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT, and with several ranks per node also LOCAL_RANK
and LOCAL_WORLD_SIZE.
"""

import json
from pathlib import Path
from typing import Optional

import click
from torch import distributed
from torch.distributed.elastic.multiprocessing.errors import record

from flyte_ddp.code_version import library_version
from flyte_ddp.data import datasets, prepared
from flyte_ddp.engine import joined
from flyte_ddp.engine.job import Identity, Subject, TrainingResult, job_of, paths_in
from flyte_ddp.errors import InputError
from flyte_ddp.launch.environment import Environment
from flyte_ddp.launch.process_group import process_group
from flyte_ddp.reading import read_settings
from flyte_ddp.recipes.hyperparameters import Hyperparameters
from flyte_ddp.report.console import Console, download_progress, say
from flyte_ddp.settings import RunOptions
from flyte_ddp.storage import content_digest, writing_to

IMAGE_CLASSIFIER = "flyte_ddp.recipes.images:ImageClassifier"
OPTIONS = ("checkpoint_seconds", "keep_checkpoint", "profile", "resume", "timeout_seconds")


@click.command(help=__doc__)
@click.option(
    "--hp", default="{}", help="Hyperparameters that differ from the defaults: JSON, or a .json or .yaml file."
)
@click.option("--options", default="{}", help=f"Any of {', '.join(OPTIONS)} of RunOptions, likewise.")
@click.option(
    "--output",
    default="without-flyte",
    type=click.Path(path_type=Path),
    help="The folder, on the first node, for model.pt, predictions.npy, and the checkpoint that the same command "
    "resumes from.",
)
@click.option(
    "--init",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="What to start from, on each node: a model.pt, or a checkpoint to continue from.",
)
@record  # so that torchrun's report has the error of the rank that failed first
def main(hp: str, options: str, output: Path, init: Optional[Path]) -> None:
    chosen = Hyperparameters.from_dict(read_settings(hp))
    with joined.own_environment(chosen) as environment:
        result = train(environment, chosen, read_options(options), output.absolute(), init)
    if environment.rank == 0:
        accuracies = [epoch.evaluated["accuracy"] for epoch in result.epochs]
        click.echo(json.dumps({"epoch_accuracies": accuracies, "model_state": str(output.absolute() / "model.pt")}))


def read_options(text: str) -> RunOptions:
    """Raises InputError for options that have no effect without Flyte."""
    given = read_settings(text)
    options = RunOptions.from_dict(given)
    others = sorted(set(given) - set(OPTIONS))
    if others:
        raise InputError(
            f"options must be of {', '.join(OPTIONS)} here, got {', '.join(others)}: torchrun's --nproc-per-node says "
            "how many ranks there are, and trackers and the report come with pyflyte"
        )
    return options


def train(
    environment: Environment, hp: Hyperparameters, options: RunOptions, output: Path, init: Optional[Path] = None
) -> TrainingResult:
    """Trains as this rank; rank 0 leaves the weights in output, and says what happens.

    init: a model_state or checkpoint to start from.
    """
    with process_group(environment, options.timeout_seconds) as device:
        data = prepare(environment, hp.dataset)
        if environment.rank == 0:
            with writing_to(output, "--output"):
                output.mkdir(parents=True, exist_ok=True)
                if not options.resume:
                    (output / "checkpoint").unlink(missing_ok=True)
        description = prepared.read_description(data)
        first = content_digest(init) if init else ""
        identity = Identity(IMAGE_CLASSIFIER, hp, description.digest, library_version(), first)
        subject = Subject(identity, description.name, data, init=init.absolute() if init else None)
        job = job_of(subject, options, **paths_in(output, options))
        result = joined.train(environment, device, job, Console() if environment.rank == 0 else None)
    if environment.rank == 0:
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


if __name__ == "__main__":
    main()
