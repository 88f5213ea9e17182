"""A training's whole state, in one file that is replaced at once."""

import io
import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from flyte_ddp.events import EpochFinished
from flyte_ddp.whole_files import write_whole


def save(path: Path, variables: Sequence[Any], history: list[EpochFinished]) -> None:
    buffer = io.BytesIO()
    epochs = json.dumps([asdict(epoch) for epoch in history])
    np.savez(buffer, *[np.asarray(variable) for variable in variables], history=np.array(epochs))
    write_whole(path, buffer.getbuffer())


def restore(path: Path, variables: Sequence[Any]) -> list[EpochFinished]:
    """Restore the variables from the checkpoint, and return its epochs; an empty list if there is no checkpoint."""
    if not path.exists():
        return []
    with np.load(path) as values:
        for number, variable in enumerate(variables):
            variable.assign(values[f"arr_{number}"])
        return [EpochFinished(**epoch) for epoch in json.loads(str(values["history"]))]
