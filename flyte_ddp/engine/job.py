"""What one training run is: the message from the parent to its ranks, and what comes back. Standard library only."""

import hashlib
import json
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Dict, List, Optional, Tuple

from flyte_ddp.data.description import DatasetDescription
from flyte_ddp.events import EpochFinished, NotLearning
from flyte_ddp.settings import RunOptions, TrainingSettings


@dataclass(frozen=True)
class Identity:
    """What decides the result of a training: recipe, settings, the data's content, and the code (each by its hash).

    init_digest: of the content of the file that it begins with, if there is one.
    """

    recipe: str
    settings: TrainingSettings
    data_digest: str
    code_version: str
    init_digest: str = ""

    def as_dict(self) -> Dict[str, Any]:
        """What must match for one run to resume from the checkpoint of another."""
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
    """What is trained on what.

    Attributes:
        identity: what decides the result.
        dataset: what the data are called.
        data: folder or file that the recipe is given; None for none.
        root: folder that the recipe's module is found from; empty where it is part of this library.
        files: of its code; empty where it is part of this library.
        description: of the prepared dataset; None where the data are anything else.
        init: a model_state or checkpoint to begin with; None for none.
    """

    identity: Identity
    dataset: str
    data: Optional[Path]
    root: str = ""
    files: Tuple[str, ...] = ()
    description: Optional[DatasetDescription] = None
    init: Optional[Path] = None


@dataclass(frozen=True)
class Job:
    """One training run, as the ranks need to know it.

    Attributes:
        identity: what decides its result.
        dataset: what the data are called.
        data: folder or file that the recipe is given; empty is none.
        model_path: where rank 0 puts the trained weights; those of the best epoch where a validation split chooses it.
        last_path: where it then puts those of the last epoch; empty is nowhere.
        predictions_path: where rank 0 puts what the recipe keeps of the test samples, an .npy of (N, ...).
        pictures_path: where rank 0 puts the recipe's pictures, an .npz.
        final_path: where rank 0 puts the checkpoint of the finished training; empty is nowhere.
        init: a model_state or checkpoint to begin with, on each host; empty is none.
        checkpoint_path: where rank 0 keeps the checkpoint; training resumes from an earlier one there.
        checkpoint_seconds: time between two checkpoints within an epoch.
        timeout_seconds: how long the ranks may go without a step before the run counts as hung.
        launched: time.time() of the launch.
        profile_path: folder for each rank's profile; empty is none.
        root: folder that the recipe's module is found from; empty where it is found anyway.
        code_files: all that the recipe may import from there.
        loader_workers: processes of each rank that read samples of a Dataset; 0 is the rank itself.
        pin_memory: whether a GPU fetches these from page-locked memory.
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
    code_files: Tuple[str, ...] = ()
    loader_workers: int = 0
    pin_memory: bool = False


def job_of(subject: Subject, options: RunOptions, **paths: str) -> Job:
    """The message to the ranks; the paths are Job's own, of which ranks other than the first need none. That of the
    final checkpoint counts where one is wished, or the training is to go on from it."""
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
        **paths,
    )


@dataclass(frozen=True)
class TrainingResult:
    """What one rank knows at the end; the epochs are the same on every rank.

    Attributes:
        warnings: in which epochs training did not learn as it should.
        headline: the measure that the run is judged by.
        train_samples, test_samples, validation_samples: of the splits.
        precision: float32 or bfloat16.
        samples_per_second: training images of this rank alone, per second of training in this attempt.
        peak_bytes: the most memory that the process has held.
        peak_gpu_bytes: the most memory that its tensors have held on the GPU; 0 on a CPU.
        tested: measures of the test split, by the weights at model_path.
        chosen_epoch: whose weights these are, from 0, where a validation split has chosen one.
        parameters: of the network.
        sample_flops: floating-point operations of a training step, forward and backward, per sample.
        hardware: name of the GPU, or the CPU's instructions.
    """

    epochs: List[EpochFinished]
    warnings: List[NotLearning]
    headline: str
    train_samples: int
    test_samples: int
    precision: str
    rank: int
    host: str
    samples_per_second: float
    peak_bytes: int
    peak_gpu_bytes: int
    validation_samples: int = 0
    tested: Dict[str, float] = field(default_factory=dict)
    chosen_epoch: Optional[int] = None
    parameters: int = 0
    sample_flops: float = 0.0
    hardware: str = ""
