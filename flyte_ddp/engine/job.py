"""A training run: the message from the parent to its ranks, and the result. Standard library only."""

import hashlib
import json
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from flyte_ddp.code_version import with_installed
from flyte_ddp.data.description import DatasetDescription
from flyte_ddp.events import EpochFinished, NotLearning
from flyte_ddp.settings import RunOptions, TrainingSettings
from flyte_ddp.storage import content_digest
from flyte_ddp.user_code import UserCode


@dataclass(frozen=True)
class Identity:
    """What determines the result of a training: recipe, settings, and hashes of the data and the code.

    init_digest: hash of the weights or checkpoint to start from, if there is one.
    """

    recipe: str
    settings: TrainingSettings
    data_digest: str
    code_version: str
    init_digest: str = ""

    def as_dict(self) -> dict[str, Any]:
        """What must be equal for one run to resume from the checkpoint of another."""
        return {
            **asdict(self.settings),
            "recipe": self.recipe,
            "data": self.data_digest,
            "code": self.code_version,
            "init": self.init_digest,
        }

    @property
    def key(self) -> str:
        return hashlib.sha256(json.dumps(self.as_dict(), sort_keys=True).encode()).hexdigest()[:16]


@dataclass(frozen=True)
class Subject:
    """What is trained, and on which data.

    Attributes:
        identity: what determines the result.
        dataset: the name of the data.
        data: the recipe's data_path, a folder or file.
        root: folder to import the recipe's module from; empty if it is part of this library.
        files: the files of its code; empty if it is part of this library.
        description: of a prepared dataset; None for other data.
        init: the model_state or checkpoint to start from, if any.
    """

    identity: Identity
    dataset: str
    data: Path | None
    root: str = ""
    files: tuple[str, ...] = ()
    description: DatasetDescription | None = None
    init: Path | None = None


def subject_of(
    code: UserCode,
    settings: TrainingSettings,
    data: Path | None = None,
    init: Path | None = None,
    description: DatasetDescription | None = None,
) -> Subject:
    """The training of a recipe; whoever asks for the same one, in whatever way, gets the same identity."""
    digest = description.digest if description else content_digest(data) if data else ""
    first = content_digest(init) if init else ""
    identity = Identity(code.name, settings, digest, with_installed(code.version), first)
    dataset = description.name if description else data.name if data else code.name.rpartition(":")[2]
    return Subject(identity, dataset, data, code.root, code.files, description, init)


@dataclass(frozen=True)
class Job:
    """One training run, as the ranks need to know it.

    Attributes:
        identity: what determines its result.
        dataset: the name of the data.
        data: the recipe's data_path, a folder or file; empty is none.
        model_path: where rank 0 writes the trained weights; with a validation split those of the best epoch.
        last_path: where it then writes those of the last epoch; empty is nowhere.
        predictions_path: where rank 0 writes the recipe's predictions on the test samples, an .npy of (N, ...).
        pictures_path: where rank 0 writes the recipe's pictures, an .npz.
        final_path: where rank 0 writes the checkpoint of the finished training; empty is nowhere.
        init: the model_state or checkpoint to start from, on each host; empty is none.
        checkpoint_path: where rank 0 keeps the checkpoint; training resumes from an earlier one there.
        checkpoint_seconds: time between two checkpoints within an epoch.
        timeout_seconds: how long the ranks may go without a step before the run counts as hung.
        launched: time.time() of the launch.
        profile_path: folder for each rank's profile; empty is none.
        root: folder to import the recipe's module from; empty if it can be imported anyway.
        code_files: all files that the recipe may import from there.
        loader_workers: processes per rank that read samples of a Dataset; with 0 the rank reads them itself.
        pin_memory: whether these are copied to a GPU from page-locked memory.
        log_gradients: whether events have each parameter's gradient norm, and histograms.
        cache_bytes: of each node's disk for Blocks; 0 is half of what is free.
    """

    identity: Identity
    dataset: str
    data: str
    checkpoint_seconds: float
    timeout_seconds: float
    launched: float
    model_path: str = ""
    last_path: str = ""
    final_path: str = ""
    init: str = ""
    predictions_path: str = ""
    pictures_path: str = ""
    checkpoint_path: str = ""
    profile_path: str = ""
    root: str = ""
    code_files: tuple[str, ...] = ()
    loader_workers: int = 0
    pin_memory: bool = False
    log_gradients: bool = False
    cache_bytes: int = 0


def job_of(subject: Subject, options: RunOptions, **paths: str) -> Job:
    """The message to the ranks; paths are fields of Job, which only rank 0 needs. final_path counts only if the options
    ask for that checkpoint, or the training stops early, to be continued."""
    if not (options.keep_checkpoint or subject.identity.settings.stop_after):
        paths["final_path"] = ""
    return Job(
        identity=subject.identity,
        dataset=subject.dataset,
        data=str(subject.data or ""),
        init=str(subject.init or ""),
        root=subject.root,
        code_files=subject.files,
        checkpoint_seconds=options.checkpoint_seconds,
        timeout_seconds=options.timeout_seconds,
        launched=time.time(),
        loader_workers=options.loader_workers,
        pin_memory=options.pin_memory,
        log_gradients=options.log_gradients,
        cache_bytes=options.cache_bytes,
        **paths,
    )


def paths_in(output: Path, options: RunOptions) -> dict[str, str]:
    """The paths for job_of of a training that leaves everything in one folder."""
    return {
        "model_path": str(output / "model.pt"),
        "last_path": str(output / "last.pt"),
        "final_path": str(output / "final-checkpoint"),
        "predictions_path": str(output / "predictions.npy"),
        "pictures_path": str(output / "pictures.npz"),
        "checkpoint_path": str(output / "checkpoint"),
        "profile_path": str(output / "profile") if options.profile else "",
    }


@dataclass(frozen=True)
class Measured:
    """What a network gives for a split.

    Attributes:
        measures: by name.
        headline: the one that the recipe's trainings are judged by.
        percent: the measures from 0 to 1 that are shown in per cent.
        samples: of the split.
        is_lower_better: by measure; without those of which it is not known.
    """

    measures: dict[str, float]
    headline: str
    percent: tuple[str, ...]
    samples: int
    is_lower_better: dict[str, bool]


@dataclass(frozen=True)
class TrainingResult:
    """What one rank knows at the end; the epochs are the same on every rank.

    Attributes:
        warnings: where training did not learn as it should.
        headline: the name of the main measure.
        train_samples, test_samples, validation_samples: sizes of the splits.
        precision: float32 or bfloat16.
        peak_bytes: peak memory of the process.
        peak_gpu_bytes: peak memory of its tensors on the GPU; 0 on a CPU.
        tested: measures of the test split, with the weights at model_path.
        chosen_epoch: the epoch of these weights, from 0; None without a validation split.
        parameters: number of the network's parameters.
        sample_flops: floating-point operations of a training step, forward and backward, per sample.
        hardware: name of the GPU, or the CPU's instruction set.
    """

    epochs: list[EpochFinished]
    warnings: list[NotLearning]
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
    hardware: str = ""
