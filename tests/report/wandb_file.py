"""Reads the .wandb file of a run: a LevelDB log of W&B's own protobuf records. wandb itself offers no reader."""

import json
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

HEADER, BLOCK = 7, 2**15
FULL, FIRST, LAST = 1, 2, 4


def records(path: Path) -> Iterator[Any]:
    from wandb.proto.wandb_internal_pb2 import Record  # type: ignore[attr-defined]

    data, at, whole = path.read_bytes(), HEADER, b""
    while at + HEADER <= len(data):
        if BLOCK - at % BLOCK < HEADER:  # too little is left of this block
            at += BLOCK - at % BLOCK
            continue
        _, size, kind = struct.unpack("<IHB", data[at : at + HEADER])
        piece = data[at + HEADER : at + HEADER + size]
        at += HEADER + size
        whole = piece if kind in (FULL, FIRST) else whole + piece
        if kind in (FULL, LAST) and whole:
            yield Record.FromString(whole)


def as_json(items: Any) -> dict[str, Any]:
    return {item.key or ".".join(item.nested_key): json.loads(item.value_json) for item in items}


class Logged:
    """What a run's file says."""

    def __init__(self, path: Path):
        self.config: dict[str, Any] = {}
        self.history: list[dict[str, Any]] = []
        self.summary: dict[str, Any] = {}
        self.artifact: dict[str, Path] = {}  # where its files lie
        self.system, self.run, self.exit_code = 0, None, None
        for record in records(path):
            kind = record.WhichOneof("record_type")
            if kind == "run":
                self.run = record.run
                self.config.update(as_json(record.run.config.update))
            elif kind == "config":
                self.config.update(as_json(record.config.update))
            elif kind == "history":
                self.history.append(as_json(record.history.item))
            elif kind == "summary":
                self.summary.update(as_json(record.summary.update))
            elif kind == "artifact":
                self.artifact = {item.path: Path(item.local_path) for item in record.artifact.manifest.contents}
            elif kind == "stats":
                self.system += 1
            elif kind == "exit":
                self.exit_code = record.exit.exit_code

    def values(self, key: str) -> list[Any]:
        return [row[key] for row in self.history if key in row]
