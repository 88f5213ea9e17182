"""A TensorBoard event file, written by TensorBoard's own record writer, which needs no torch."""

import os
import textwrap
import time
from collections.abc import Iterable, Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any

from flyte_ddp.events import GradientsSeen
from flyte_ddp.report.figures import png_of
from flyte_ddp.report.predictions import predictions_of
from flyte_ddp.report.record import RunFinished, RunInfo
from flyte_ddp.report.tracker import DIGEST, Tracker

MISTAKES = 16
RECORD_BYTES = 16  # of a record, besides its content


def events_file(info: RunInfo) -> Path:
    """Return the file that all attempts at a training write to, one after the other."""
    return info.logs / "tensorboard" / f"events.out.tfevents.{info.tracking_id}"


class TensorBoard(Tracker):
    """Writes scalars, gradient histograms, hyperparameters and confident mistakes into the run's logs folder.

    A resumed training repeats steps, and these are written once.
    """

    def __init__(self, info: RunInfo):
        from tensorboard.compat.proto import event_pb2, summary_pb2
        from tensorboard.plugins.text.summary_v2 import text_pb
        from tensorboard.summary.writer.record_writer import RecordWriter

        super().__init__(info)
        self._events, self._summaries = event_pb2, summary_pb2
        file = events_file(info)
        file.parent.mkdir(exist_ok=True)
        self._reached: dict[str, int] = {}  # by tag the last step that is in the file
        is_new = not (file.exists() and file.stat().st_size)
        if not is_new:
            self._read(file)
        # Not by EventFileWriter: its thread prints a traceback if the disk is full, and is not there from then on
        self._writer = RecordWriter(open(file, "ab"))  # noqa: SIM115 open until the end
        self._text: Any = text_pb
        if is_new:
            self._add(file_version="brain.Event:2")
        settings = text_pb("hyperparameters", textwrap.indent(info.settings.to_json(indent=1), "    "))
        self._write(0, settings.value)

    def on_gradients_seen(self, event: GradientsSeen) -> None:
        step = (event.epoch + 1) * self._steps_per_epoch
        self._write(step, [self._histogram(name, *counted) for name, counted in event.histograms.items()])

    def on_run_finished(self, event: RunFinished) -> None:
        """Writes the confident mistakes."""
        predictions = predictions_of(self._info, event)
        if predictions is None:
            return
        classes, values = predictions.classes, []
        for number, index in enumerate(predictions.confident_mistakes(MISTAKES)):
            pixels = predictions.images[index]
            truth, guess = classes[predictions.labels[index]], classes[predictions.guesses[index]]
            _, height, width = pixels.shape
            image = self._summaries.Summary.Image(
                height=height, width=width, colorspace=3, encoded_image_string=png_of(pixels, max(height, width))
            )
            tag = f"mistakes/{number + 1}: {truth} taken for {guess}"
            values.append(self._summaries.Summary.Value(tag=tag, image=image))
        self._write(self._step(event.results[0].epochs[-1]), values)

    def close(self) -> None:
        self._writer.close()

    def _read(self, file: Path) -> None:
        """Note what is in the file, and cut off a record that a killed attempt has begun."""
        from tensorboard.backend.event_processing.event_file_loader import RawEventFileLoader

        whole = 0
        for record in RawEventFileLoader(str(file)).Load():
            whole += len(record) + RECORD_BYTES
            event = self._events.Event.FromString(record)
            self._reached.update({value.tag: event.step for value in event.summary.value})
        os.truncate(file, whole)

    def _write(self, step: int, values: Iterable[Any]) -> None:
        new = [value for value in values if step > self._reached.get(value.tag, -1)]
        if new:
            self._add(step=step, summary=self._summaries.Summary(value=new))

    def _add(self, **content: Any) -> None:
        self._writer.write(self._events.Event(wall_time=time.time(), **content).SerializeToString())
        self._writer.flush()

    def _scalars(self, step: int, group: str, values: Mapping[str, float]) -> None:
        value = self._summaries.Summary.Value
        self._write(step, [value(tag=f"{group}/{name}", simple_value=x) for name, x in values.items()])

    def _digest(self, step: int, digest: str) -> None:
        self._write(step, self._text(DIGEST, digest).value)

    def _histogram(self, name: str, counts: list[float], edges: list[float]) -> Any:
        """Moments are computed from the bins' centres, since the gradients themselves stay in the ranks."""
        centres = [(low + high) / 2 for low, high in pairwise(edges)]
        histogram = self._summaries.HistogramProto(
            min=edges[0],
            max=edges[-1],
            num=sum(counts),
            sum=sum(count * x for count, x in zip(counts, centres, strict=True)),
            sum_squares=sum(count * x * x for count, x in zip(counts, centres, strict=True)),
            bucket_limit=edges[1:],
            bucket=counts,
        )
        return self._summaries.Summary.Value(tag=f"gradients/{name}", histo=histogram)
