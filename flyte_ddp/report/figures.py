"""Curves and pictures that are embedded in the page: SVG in the page's colours, PNG as data URIs."""

import base64
import io
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

import numpy as np

from flyte_ddp.report.plot import Plot, Points

MOST_POINTS = 300
COLOURS = [f"var(--c{number})" for number in range(1, 9)]
DASHES = ("", "7 3", "2 2", "7 2 2 2")  # not everyone can tell series apart by colours alone
WARNING = 'stroke="var(--bad)" stroke-width="1.8" stroke-dasharray="2 2"'
CHOSEN = 'stroke="var(--ink)" stroke-dasharray="7 3"'


@dataclass(frozen=True)
class Curves:
    """Named series of (x, value).

    Attributes:
        remark: a sentence at the end of the text alternative.
        x: what the horizontal axis shows.
        marks: values of x with a warning.
        chosen: the best value of x.
    """

    title: str
    series: Mapping[str, Points]
    remark: str = ""
    percent: bool = False
    logarithmic: bool = False
    from_zero: bool = False
    x: str = "epochs"
    marks: Sequence[float] = ()
    chosen: float | None = None

    @property
    def description(self) -> str:
        said = [
            f"{name or self.title} from {points[0][1]:.4g} to {points[-1][1]:.4g}"
            for name, points in self.series.items()
            if points
        ]
        marked = f" Warnings at {', '.join(f'{mark:.3g}' for mark in self.marks)}." if self.marks else ""
        best = "" if self.chosen is None else f" The best: {self.chosen:g}."
        return f"{self.title} over {self.x}: {'; '.join(said)}.{marked}{best} {self.remark}".strip()


def draw(curves: Curves) -> str:
    """Draw curves as the text of an SVG element, with a legend.

    Vertical lines mark each x in curves.marks (a warning) and curves.chosen (the best x). A series is thinned out to
    MOST_POINTS points. A series of fewer than 30 points gets markers.

    Args:
        curves: the series, of which at least one must have points.
    """
    series = {name: thin_out(points) for name, points in curves.series.items() if points}
    pens = {name: pen(number, DASHES[number // 8 % 4]) for number, name in enumerate(series)}
    dots = {name: dot(number) if len(series[name]) < 30 else "" for number, name in enumerate(series)}
    marks = dict.fromkeys(curves.marks, WARNING)
    legend = {name: sample(pens[name]) + dots[name] for name in series}
    if marks:
        legend["warning"] = sample(WARNING)
    if curves.chosen is not None:
        marks[curves.chosen] = CHOSEN
        legend["chosen"] = sample(CHOSEN)
    plot = Plot([*legend.items()] if len(legend) > 1 else [])
    drawn = [*chain.from_iterable(series.values())]
    values = [y for _, y in drawn]
    y = plot.vertical(
        values, write=percent if curves.percent else number, logarithmic=curves.logarithmic, from_zero=curves.from_zero
    )
    at = [*marks, *(x for x, _ in drawn)]
    x = plot.horizontal(at, y, integer=max(at) > 3 and max(at) - min(at) >= 1)
    plot.axes(x, y, curves.x)
    for name, points in series.items():
        plot.line(points, pens[name])
        plot.symbols(points, dots[name])
    for mark, mark_pen in marks.items():
        plot.across(mark, mark_pen)
    return plot.svg(curves.description)


def scatter(x_name: str, x: Sequence[Any], y_name: str, y: Sequence[float | None], are_fractions: bool = False) -> str:
    """Draw points as the text of an SVG element, with a ring around the first point that has a value, the best.

    Args:
        x_name: what the horizontal axis shows.
        x: numbers, or names. The axis is logarithmic if the numbers are positive and differ by a factor of 10 or more.
        y_name: what the vertical axis shows.
        y: the values, best first. None stands for a failure, drawn as a cross. At least one must be a number.
        are_fractions: whether y are positive fractions, to be shown in per cent on a logarithmic axis.
    """
    names = list(dict.fromkeys(x)) if isinstance(x[0], str) else []
    places = [names.index(one) if names else one for one in x]
    points = [(place, value) for place, value in zip(places, y, strict=True) if value is not None]
    missing = [place for place, value in zip(places, y, strict=True) if value is None]
    ring = f'<circle r="7" fill="none" stroke="{COLOURS[1]}" stroke-width="1.8"/>'
    cross = f'<path d="M-4-4L4 4M-4 4L4-4" stroke="{COLOURS[4]}" stroke-width="1.8"/>'
    plot = Plot([(y_name, dot(0)), ("best", ring), *([("failed", cross)] if missing else [])])
    values = [value for _, value in points]
    vertical = plot.vertical(values, write=percent if are_fractions else number, logarithmic=are_fractions)
    wide = not names and min(places) > 0 and max(places) >= 10 * min(places)
    few = sorted(set(places)) if names or len(set(places)) <= 6 else []
    write = (lambda place: names[place]) if names else number
    plot.axes(plot.horizontal(places, vertical, write=write, logarithmic=wide, ticks=few), vertical, x_name)
    plot.symbols(points, dot(0))
    plot.symbols(points[:1], ring)
    plot.symbols([(place, vertical.last) for place in missing], cross)
    best = f"{values[0]:.2%}" if are_fractions else f"{values[0]:.4g}"
    said = f"{y_name} by {x_name}: {len(points)} values, the best {best} at {x[y.index(values[0])]}"
    return plot.svg(f"{said}; {len(missing)} without" if missing else said)


def pen(series: int, dash: str) -> str:
    return f'stroke="{COLOURS[series % 8]}" stroke-width="1.8"' + (f' stroke-dasharray="{dash}"' if dash else "")


def dot(series: int) -> str:
    return f'<circle r="2.5" fill="{COLOURS[series % 8]}"/>'


def sample(pen: str) -> str:
    """Draw a short line for a legend."""
    return f'<path d="M-10 0H10" {pen}/>'


def number(value: float) -> str:
    return f"{value:,.10g}"


def percent(value: float) -> str:
    return f"{100 * value:,.10g}%"


def thin_out(points: Points) -> list[tuple[float, float]]:
    """Return at most MOST_POINTS of the points, evenly spread, always with the last one."""
    every = -(-len(points) // MOST_POINTS)
    return list(reversed(list(points)[::-1][::every]))


def picture(image: np.ndarray, most: int = 64) -> str:
    """Encode an image (C, H, W) uint8 as a PNG data URI, made smaller if a side exceeds `most` pixels."""
    return "data:image/png;base64," + base64.b64encode(encode_png(image, most)).decode()


def encode_png(image: np.ndarray, most: int) -> bytes:
    from PIL import Image

    pixels = image.transpose(1, 2, 0) if len(image) == 3 else image[0]
    png = Image.fromarray(np.ascontiguousarray(pixels))
    png.thumbnail((most, most))
    file = io.BytesIO()
    png.save(file, "png", optimize=True)
    return file.getvalue()
