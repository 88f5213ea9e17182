"""TensorBoard event files, written by TensorBoard's own record writer, which needs no torch."""

import os
import socket
import textwrap
import time
from collections.abc import Mapping
from itertools import pairwise
from typing import Any

from flyte_ddp.events import GradientsSeen
from flyte_ddp.report.figures import png_of
from flyte_ddp.report.predictions import predictions_of
from flyte_ddp.report.record import RunFinished, RunInfo
from flyte_ddp.report.tracker import DIGEST, Tracker

MISTAKES = 16


class TensorBoard(Tracker):
    """Writes scalars, gradient histograms, hyperparameters and confident mistakes into the run's logs folder."""

    def __init__(self, info: RunInfo):
        from tensorboard.compat.proto import event_pb2, summary_pb2
        from tensorboard.plugins.text.summary_v2 import text_pb
        from tensorboard.summary.writer.record_writer import RecordWriter

        super().__init__(info)
        self._events, self._summaries = event_pb2, summary_pb2
        folder = info.logs / "tensorboard"
        folder.mkdir(exist_ok=True)
        name = f"events.out.tfevents.{int(time.time())}.{socket.gethostname()}.{os.getpid()}"
        # Not by EventFileWriter: its thread prints a traceback if the disk is full, and is not there from then on
        self._writer = RecordWriter(open(folder / name, "ab"))  # noqa: SIM115 open until the end
        self._text: Any = text_pb
        self._add(file_version="brain.Event:2")
        settings = text_pb("hyperparameters", textwrap.indent(info.settings.to_json(indent=1), "    "))
        self._add(step=0, summary=settings)

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

    def _write(self, step: int, values: list[Any]) -> None:
        self._add(step=step, summary=self._summaries.Summary(value=values))

    def _add(self, **content: Any) -> None:
        self._writer.write(self._events.Event(wall_time=time.time(), **content).SerializeToString())
        self._writer.flush()

    def _scalars(self, step: int, group: str, values: Mapping[str, float]) -> None:
        value = self._summaries.Summary.Value
        self._write(step, [value(tag=f"{group}/{name}", simple_value=x) for name, x in values.items()])

    def _digest(self, step: int, digest: str) -> None:
        self._add(step=step, summary=self._text(DIGEST, digest))

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
