"""A TensorBoard event file, written by TensorBoard's own record writer, which needs no torch."""

import json
import os
import textwrap
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from flyte_ddp.errors import not_installed
from flyte_ddp.fields import plain
from flyte_ddp.report.figures import encode_png
from flyte_ddp.report.predictions import Predictions
from flyte_ddp.report.record import RunInfo
from flyte_ddp.report.tracker import Tracker, first_part
from flyte_ddp.text import encodable

MISTAKES = 16
RECORD_BYTES = 16  # the size of a record besides its content


def events_file(info: RunInfo) -> Path:
    """Return the file that all attempts at a training write to, one after the other.

    A folder of its own makes a training a run of its own, even beside another training with the same logs.
    """
    return info.logs / "tensorboard" / info.tracking_id / f"events.out.tfevents.{info.tracking_id}"


class TensorBoard(Tracker):
    """An event file in the run's logs, to which each attempt appends."""

    label = "TensorBoard"
    module = "tensorboard"
    remedy = f"tracking tensorboard needs {not_installed('tensorboard', 'tensorboard')}"

    def open(self, parameters: Mapping[str, Any]) -> None:
        from tensorboard.compat.proto import event_pb2, summary_pb2
        from tensorboard.plugins.text.summary_v2 import text_pb
        from tensorboard.summary.writer.record_writer import RecordWriter

        self._events: Any = event_pb2
        self._summaries: Any = summary_pb2
        self._text: Any = text_pb
        self._step = 0
        file = events_file(self.info)
        file.parent.mkdir(parents=True, exist_ok=True)
        is_new = not (file.exists() and file.stat().st_size)
        if not is_new:
            self._read(file)
        # EventFileWriter would not do: if the disk is full, its thread prints a traceback and ends
        self._writer = RecordWriter(open(file, "ab"))  # noqa: SIM115 the file stays open until finish()
        if is_new:
            self._add(file_version="brain.Event:2")
            self._write([self._value("hyperparameters", _as_text(parameters))])

    def describe(self, world: Mapping[str, Any], layers: Sequence[tuple[str, str, int]]) -> None:
        self.summary({"world": world})

    def log(self, step: int, values: Mapping[str, float | str]) -> None:
        self._step = step
        self._write([self._value(name, value) for name, value in values.items()])

    def histograms(self, step: int, counted: Mapping[str, tuple[list[float], list[float]]]) -> None:
        self._step = step
        self._write([self._histogram(name, *bins) for name, bins in counted.items()])

    def predictions(self, step: int, predictions: Predictions) -> None:
        """Write the MISTAKES most confident mistakes as images at a step, tagged with true and predicted class."""
        self._step = step
        classes = predictions.classes
        values = []
        for number, index in enumerate(predictions.confident_mistakes(MISTAKES)):
            pixels = predictions.images[index]
            truth = classes[predictions.labels[index]]
            guess = classes[predictions.guesses[index]]
            _, height, width = pixels.shape
            image = self._summaries.Summary.Image(
                height=height, width=width, colorspace=3, encoded_image_string=encode_png(pixels, max(height, width))
            )
            tag = f"predictions/{number + 1}: {truth} taken for {guess}"
            values.append(self._summaries.Summary.Value(tag=tag, image=image))
        self._write(values)

    def summary(self, values: Mapping[str, Any]) -> None:
        """Write each value as a text at the latest step."""
        self._write([self._value(f"summary/{name}", _as_text(value)) for name, value in values.items()])

    def finish(self, has_succeeded: bool, report: Path) -> None:
        self._writer.close()

    def _read(self, file: Path) -> None:
        """Read the last step into self._step, and the last step of each group of values into self.earlier.

        If a killed attempt has left an incomplete record at the end of the file, the method cuts it off.

        Args:
            file: the file of the earlier attempts.
        """
        from tensorboard.backend.event_processing.event_file_loader import RawEventFileLoader

        whole = 0
        for record in RawEventFileLoader(str(file)).Load():
            whole += len(record) + RECORD_BYTES
            event = self._events.Event.FromString(record)
            self._step = event.step
            self.earlier |= {first_part(value.tag): event.step for value in event.summary.value}
        os.truncate(file, whole)

    def _write(self, values: list[Any]) -> None:
        self._add(step=self._step, summary=self._summaries.Summary(value=values))

    def _add(self, **content: Any) -> None:
        self._writer.write(self._events.Event(wall_time=time.time(), **content).SerializeToString())
        self._writer.flush()

    def _value(self, name: str, value: float | str) -> Any:
        if isinstance(value, str):
            return self._text(name, value).value[0]
        return self._summaries.Summary.Value(tag=name, simple_value=value)

    def _histogram(self, name: str, counts: list[float], edges: list[float]) -> Any:
        histogram = self._summaries.HistogramProto(
            min=edges[0], max=edges[-1], num=sum(counts), bucket_limit=edges[1:], bucket=counts
        )
        return self._summaries.Summary.Value(tag=name, histo=histogram)


def _as_text(value: Any) -> str:
    """Return a value as Markdown. A mapping becomes a block of JSON, indented by four spaces."""
    text = textwrap.indent(json.dumps(plain(value), indent=1), "    ") if isinstance(value, dict) else str(value)
    return encodable(text)
