"""The training of workflows/mnist.py without Flyte: with ranks of its own, or as one of the ranks that torchrun starts.

\b
python -m workflows.without_flyte --output OUT --hp '{"epochs": 1}'
torchrun --nproc-per-node 2 -m workflows.without_flyte --output OUT
torchrun --nnodes 2 --nproc-per-node 2 --rdzv-backend c10d --rdzv-endpoint HOST:29500 -m workflows.without_flyte

Other launchers must set RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT, and with several ranks per node also LOCAL_RANK
and LOCAL_WORLD_SIZE.
"""

import json
import os
from pathlib import Path

import click

from flyte_ddp.data.sources import datasets
from flyte_ddp.errors import InputError
from flyte_ddp.launch.environment import is_first_rank
from flyte_ddp.reading import read_settings
from flyte_ddp.recipes.hyperparameters import Hyperparameters
from flyte_ddp.report.console import download_progress, show_output
from flyte_ddp.settings import RunOptions
from flyte_ddp.training import train

IMAGE_CLASSIFIER = "flyte_ddp.recipes.images:ImageClassifier"
TIMEOUTS = ("timeout_seconds", "start_timeout_seconds", "write_timeout_seconds")
OPTIONS = ("checkpoint_seconds", "keep_checkpoint", "nproc", "profile", "resume", *TIMEOUTS)


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
def main(hp: str, options: str, output: Path, init: Path | None) -> None:
    show_output()
    chosen = Hyperparameters.from_dict(read_settings(hp))
    run_options = read_options(options)
    # There is no stand-in: the nodes might choose different ones
    with download_progress() as progress:
        data = datasets.prepare("mnist" if chosen.dataset == "auto" else chosen.dataset, progress)
    result = train(IMAGE_CLASSIFIER, chosen, run_options, data, output, init=init)
    if is_first_rank():
        accuracies = [epoch.evaluated["accuracy"] for epoch in result.epochs]
        click.echo(json.dumps({"epoch_accuracies": accuracies, "model_state": str(result.model_path)}))


def read_options(text: str) -> RunOptions:
    """Read RunOptions as JSON or from a file. Raises InputError for options that have no effect here."""
    given = read_settings(text)
    options = RunOptions.from_dict(given)
    if others := sorted(set(given) - set(OPTIONS)):
        raise InputError(
            f"options must be of {', '.join(OPTIONS)} here, got {', '.join(others)}: trackers and the report come with "
            "pyflyte"
        )
    if "nproc" in given and "WORLD_SIZE" in os.environ:
        raise InputError(f"nproc must be left out under torchrun, got {options.nproc}: --nproc-per-node says it")
    return options


if __name__ == "__main__":
    main()
