"""What tests only read is made once for all workers of a session."""

import json
import os
import re
import shutil
from collections.abc import Callable
from hashlib import sha256
from pathlib import Path
from typing import Any, NamedTuple

from filelock import FileLock

from tests.commands import pyflyte


def made_once(name: str, make: Callable[[Path], object]) -> Path:
    """The folder of this name that all workers share, filled by whoever asks first; the others wait."""
    folder = Path(os.environ["DDP_TEST_SHARED"], name)
    made = folder.with_name(f"{name}.made")
    with FileLock(f"{folder}.lock"):
        if not made.exists():
            shutil.rmtree(folder, ignore_errors=True)  # of an attempt that failed
            folder.mkdir()
            make(folder)
            made.touch()
    return folder


def digest(*what: object) -> str:
    return sha256(repr(what).encode()).hexdigest()[:16]


class Classifier(NamedTuple):
    model: Path
    accuracy: float


def trained_classifier(**hp: Any) -> Classifier:
    """What pytorch_training_wf makes of an epoch of the digits."""
    settings = json.dumps({"dataset": "digits", "epochs": 1, **hp}, sort_keys=True)

    def train(folder: Path) -> None:
        arguments = ("workflows/mnist.py", "pytorch_training_wf", "--hp", settings)
        (folder / "said").write_text(pyflyte(*arguments, environment={"DDP_RUNS_DIR": str(folder)}).stdout)

    said = (made_once(f"classifier-{digest(settings)}", train) / "said").read_text()
    model, accuracy = (re.findall(rf"{name}=([^,)]+)", said)[0] for name in ("model_state", r"\baccuracy"))
    return Classifier(Path(model), float(accuracy))
