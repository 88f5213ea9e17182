"""Checkpoints of a Keras training: its whole state, in one file that is verified when it is read."""

import hashlib
import io
import json
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any, List, Sequence

import numpy as np

from flyte_ddp.events import CheckpointFailed, CheckpointRefused, CheckpointWritten, EpochFinished
from flyte_ddp.launch.link import Link
from flyte_ddp.storage import write_whole

DIGEST_BYTES = hashlib.sha256().digest_size


def save(path: Path, key: str, variables: Sequence[Any], history: List[EpochFinished], link: Link) -> None:
    """Writes the variables' values and the epochs so far to path; a disk error is only reported."""
    started = time.monotonic()
    buffer = io.BytesIO()
    progress = json.dumps({"key": key, "history": [asdict(epoch) for epoch in history]})
    np.savez(buffer, *[np.asarray(variable) for variable in variables], progress=np.array(progress))
    try:
        write_whole(path, hashlib.sha256(buffer.getbuffer()).digest(), buffer.getbuffer())
    except OSError as error:
        link.emit(CheckpointFailed(f"{path}: {error.strerror}"))
    else:
        seconds = time.monotonic() - started
        link.emit(CheckpointWritten(len(history), 0, str(path), stall_seconds=seconds, write_seconds=0.0))


def restore(path: Path, key: str, variables: Sequence[Any], link: Link) -> List[EpochFinished]:
    """Restores the variables from a checkpoint of this training, if there is one, and returns its epochs."""
    if not path.exists():
        return []
    raw = path.read_bytes()
    digest, payload = raw[:DIGEST_BYTES], raw[DIGEST_BYTES:]
    if hashlib.sha256(payload).digest() != digest:
        link.emit(CheckpointRefused("the checkpoint is damaged: its content does not match its checksum"))
        return []
    with np.load(io.BytesIO(payload)) as values:
        progress = json.loads(str(values["progress"]))
        if progress["key"] != key:
            link.emit(CheckpointRefused("the checkpoint belongs to another training"))
            return []
        for number, variable in enumerate(variables):
            variable.assign(values[f"arr_{number}"])
    return [EpochFinished(**epoch) for epoch in progress["history"]]
