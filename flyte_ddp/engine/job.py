"""A training run: the message from the parent to its ranks, and the result. Standard library only."""

import hashlib
import json
import os
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol

from flyte_ddp.code.code_version import hash_of_file, with_installed
from flyte_ddp.code.user_code import UserCode
from flyte_ddp.data.description import DatasetDescription, StoredData
from flyte_ddp.events import EpochFinished, Warned
from flyte_ddp.model_files.pretrained import check_pretrained
from flyte_ddp.settings import RunOptions, TrainingSettings
from flyte_ddp.whole_files import content_digest, reading

OUTPUT = "output"  # the argument of train()
# What rank 0 leaves in the logs: the recipe's predictions (N, ...) on the test samples, its pictures, the weights of
# the last epoch where others may be better, and the checkpoint of the finished training, on request; see KeptModel, too
PREDICTIONS, PICTURES, LAST, FINAL = "predictions.npy", "pictures.npz", "last.pt", "final-checkpoint"


@dataclass(frozen=True)
class Subject:
    """The subject of a training: what is trained, and on which data.

    Attributes:
        recipe: "package.module:Name".
        settings: the settings of the training.
        code_version: the version of the recipe's code, and of the installed libraries that matter.
        dataset: the name of the data.
        data: the recipe's data_path, a folder or file, or where the data are stored.
        data_digest: hash of the data; empty without data.
        root: folder to import the recipe's module from.
        files: the files of the recipe's code that are not of this library.
        description: the description of a prepared dataset; None for other data.
        init: the model_state or checkpoint to start from, if any.
        init_digest: hash of the content of init.
    """

    recipe: str
    settings: TrainingSettings
    code_version: str
    dataset: str
    data: Path | StoredData | None = None
    data_digest: str = ""
    root: str = ""
    files: tuple[str, ...] = ()
    description: DatasetDescription | None = None
    init: Path | None = None
    init_digest: str = ""

    @property
    def identity(self) -> dict[str, Any]:
        """The facts that determine the result of the training: settings, recipe, data, code and initial weights.

        A run can resume from another run's checkpoint only if both have the same facts. The settings are a dict; the
        recipe is its name; data, code and init are digests, empty if there is none.
        """
        return {
            "settings": asdict(self.settings),
            "recipe": self.recipe,
            "data": self.data_digest,
            "code": self.code_version,
            "init": self.init_digest,
        }

    @property
    def hashes(self) -> dict[str, str]:
        """The hash of each file of the user's code, by its path below root."""
        return {os.path.relpath(file, self.root): hash_of_file(file) for file in self.files if os.path.isfile(file)}

    @property
    def key(self) -> str:
        """The hash of the identity, 16 hex digits."""
        return hashlib.sha256(json.dumps(self.identity, sort_keys=True).encode()).hexdigest()[:16]


def make_subject(
    code: UserCode,
    settings: TrainingSettings,
    data: Path | StoredData | None = None,
    init: Path | None = None,
    description: DatasetDescription | None = None,
) -> Subject:
    """Describe the training of a recipe. Equal trainings get equal identities.

    All files of init are read and, without a description, all files of the data.

    Args:
        code: the code of the recipe.
        settings: the settings of the training.
        data: a folder or file, or data in a storage; None without data.
        init: the weights or checkpoint to start from; None for a fresh start.
        description: the description of a prepared dataset. It replaces the name and digest of the data.

    Raises:
        InputError: init is a folder without complete weights, init or the data may not be read, or they have a link to
            a folder that contains the link.
        OSError: init or the data are missing, or cannot be read for another reason.
    """
    with reading():
        if init and init.is_dir():
            check_pretrained(init)
    named = description or data
    return Subject(
        recipe=code.name,
        settings=settings,
        code_version=with_installed(code.version),
        dataset=named.name if named else _choose_name(code),
        data=data,
        data_digest=description.digest if description else compute_data_digest(data),
        root=code.root,
        files=code.files,
        description=description,
        init=init,
        init_digest=compute_data_digest(init),
    )


def _choose_name(code: UserCode) -> str:
    """Return the name of a recipe, or of a function's package, since functions may all be called train."""
    module, _, name = code.name.partition(":")
    return name if name[:1].isupper() else module.rpartition(".")[0] or module


def compute_data_digest(data: Path | StoredData | None) -> str:
    """Return the hash of a file's or folder's content, the recorded digest of stored data, or "" without data.

    Stored data are not read.

    Raises:
        InputError: The data may not be read, or have a link to a folder that contains the link.
        OSError: The data are missing, or cannot be read for another reason.
    """
    if isinstance(data, StoredData):
        return data.digest
    with reading():
        return content_digest(data) if data else ""


class RankStorage(Protocol):
    """The platform's storage, where each rank reaches it by itself.

    Attributes:
        path: the file on this rank's own disk that stands for the training's checkpoint in the storage.
    """

    path: Path

    def put(self, file: Path) -> None:
        """Upload a file in a folder beside the path.

        Raises:
            OSError: The upload fails.
        """

    def put_manifest(self, file: Path) -> None:
        """Upload the file at the path, and before it all else that this checkpoint needs; only rank 0 does so.

        Raises:
            OSError: The upload fails.
        """

    def get(self, url: str, file: Path) -> None:
        """Download a file.

        Raises:
            FileNotFoundError: The storage has no such file.
            RecoverableError: The download fails.
        """


@dataclass(frozen=True, kw_only=True)
class Job(Subject):
    """A run of a training, as its ranks need to know it.

    Rank 0 writes; each path may be empty on the others.

    Attributes:
        options: the options of the run.
        model_path: where the trained weights go; with a validation split those of the best epoch.
        checkpoint_path: where the checkpoint is kept; training resumes from an earlier one there.
        logs: the folder for all else: PREDICTIONS, PICTURES, LAST, FINAL, and the profile of each rank.
        chosen_by: the environment variable, or "output" for train()'s argument, by which the user chooses the folder.
        storage: where each rank keeps its shards of a checkpoint; None if they stay beside checkpoint_path.
        launched: time.time() of the launch.
        avoided: a sentence on each node that pods should keep away from, by the node's name; see attempt/avoided.py.
    """

    options: RunOptions
    model_path: str = ""
    checkpoint_path: str = ""
    logs: str = ""
    chosen_by: str = "DDP_RUNS_DIR"
    storage: RankStorage | None = None
    launched: float = field(default_factory=time.time)
    avoided: Mapping[str, str] = field(default_factory=dict)

    @property
    def checkpoint_identity(self) -> dict[str, Any]:
        """Return what must be equal to resume from a checkpoint: compiled code draws other numbers."""
        return {**self.identity, "compile": self.options.compile}


def make_job(
    subject: Subject,
    options: RunOptions = RunOptions(),  # noqa: B008 frozen
    model_path: str | Path = "",
    checkpoint_path: str | Path = "",
    logs: str | Path = "",
) -> Job:
    """Return the Job of a training: the subject's attributes, the options, and the paths as texts.

    The training's start-up time counts from this call.

    Args:
        subject: the recipe, settings, data and code.
        options: the options.
        model_path: the file for the trained weights.
        checkpoint_path: the checkpoint's file; empty if this rank writes no checkpoint.
        logs: the folder for all other files, such as predictions.
    """
    return Job(
        **vars(subject),
        options=options,
        model_path=str(model_path),
        checkpoint_path=str(checkpoint_path),
        logs=str(logs),
    )


def job_in(folder: Path, subject: Subject, options: RunOptions) -> Job:
    """Make a job that leaves all its files in one folder: model.pt, checkpoint, and its logs beside them."""
    job = make_job(subject, options, model_path=folder / "model.pt", checkpoint_path=folder / "checkpoint", logs=folder)
    return replace(job, chosen_by=OUTPUT)


@dataclass(frozen=True)
class Measured:
    """The measures of a network on a split.

    Attributes:
        measures: the measures by name.
        headline: the measure that the recipe's trainings are judged by.
        percent: the measures from 0 to 1 that are shown in per cent.
        samples: the number of samples of the split.
        is_lower_better: whether lower is better, by measure; without the measures for which that is not known.
    """

    measures: dict[str, float]
    headline: str
    percent: tuple[str, ...]
    samples: int
    is_lower_better: dict[str, bool]


@dataclass(frozen=True)
class KeptModel:
    """A file with the weights of one of the best evaluations, which options.keep_best has left in the logs.

    Attributes:
        file: the name of the file in the logs, which has the weights as model_state has those of the best.
        epoch: the epoch after which the evaluation was, with fractions where an epoch has several.
        measure: the measure that the best are chosen by.
        value: the value of that measure, on the validation split.
    """

    file: str
    epoch: float
    measure: str
    value: float


@dataclass(frozen=True)
class TrainingResult:
    """The result of a training, as one rank knows it; the epochs are the same on every rank.

    Attributes:
        epochs: each evaluation, with the training before it.
        warnings: where training did not go as it should.
        headline: the name of the main measure.
        train_samples, test_samples, validation_samples: sizes of the splits.
        precision: "float32" or "bfloat16".
        peak_bytes: peak memory of the process.
        peak_gpu_bytes: peak memory of its tensors on the GPU; 0 on a CPU.
        tested: measures of the test split, with the weights at model_path.
        chosen_epoch: which of the evaluations in `epochs` these weights are of, from 0; None where none was the best.
        parameters: number of the network's parameters.
        sample_flops: floating-point operations of a training step, forward and backward, per sample.
        tokens: how many tokens the training's samples had; 0 where they are not counted.
        skipped_updates: how many updates were left out, see TrainingSettings.skip_spikes.
        hardware: name of the GPU, or the CPU's instruction set.
        kept: the best evaluations that options.keep_best asked for, the best first; on rank 0.
        digest: the digest of the weights at model_path, 16 hex digits.
        lower_is_better: the names of measures besides the loss of which the recipe says so.
    """

    epochs: list[EpochFinished]
    warnings: list[Warned]
    headline: str
    train_samples: int
    test_samples: int
    precision: str
    peak_bytes: int
    peak_gpu_bytes: int
    validation_samples: int = 0
    tested: dict[str, float] = field(default_factory=dict)
    chosen_epoch: int | None = None
    parameters: int = 0
    sample_flops: float = 0.0
    tokens: float = 0.0
    skipped_updates: int = 0
    hardware: str = ""
    kept: list[KeptModel] = field(default_factory=list)
    digest: str = ""
    lower_is_better: list[str] = field(default_factory=list)
