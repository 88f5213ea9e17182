"""Curves and pictures embedded in the page: SVG in the page's colours (words without matplotlib), PNG as data URIs."""

import base64
import html
import io
import logging
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from importlib import import_module
from typing import Any

import numpy as np

from flyte_ddp.errors import not_installed
from flyte_ddp.report.console import say

# Placeholders for the page's colours while matplotlib draws: the page has a light and a dark theme
INK, GRID, BAD, SERIES = "#010101", "#020202", "#040404", [f"#0{number}0303" for number in range(1, 9)]
COLOURS = {INK: "var(--ink)", GRID: "var(--line)", BAD: "var(--bad)"}
COLOURS.update({name: f"var(--c{n})" for n, name in enumerate(SERIES, 1)})
SIZE = (4.6, 2.9)  # inches of 72 units, so that the text is readable on a page 360 pixels wide
MOST_LETTERS = 24  # of a name in a legend, of which the end is kept: longer names leave no room for curves
MOST_POINTS = 300
LINES = ("-", "--", ":", "-.")  # colours alone don't tell series apart for everyone

PLOT_STYLE: Any = {
    "svg.fonttype": "none",  # text stays text: smaller, and in the page's font
    "svg.hashsalt": "report",
    "text.parse_math": False,  # names of layers may hold a $
    "font.size": 10,
    "text.color": INK,
    "axes.labelcolor": INK,
    "xtick.color": INK,
    "ytick.color": INK,
    "axes.edgecolor": GRID,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.color": GRID,
    "grid.linewidth": 0.6,
    "lines.linewidth": 1.8,
    "lines.markersize": 4,
    "legend.frameon": False,
    "legend.fontsize": 9,
}

Points = Sequence[tuple[float, float]]


@dataclass(frozen=True)
class Curves:
    """Named series of (x, value).

    Attributes:
        remark: added to the text alternative, after the first and last values.
        x: what the horizontal axis shows.
        ranges: for a series, (lowest, highest) of each of its points, shown as error bars.
        marks: values of x with a warning.
        chosen: the value of x that was the best.
        ticks: if given, the only labelled values of x, on a logarithmic axis.
    """

    title: str
    series: Mapping[str, Points]
    remark: str = ""
    percent: bool = False
    logarithmic: bool = False
    from_zero: bool = False
    x: str = "epochs"
    ranges: Mapping[str, Points] = field(default_factory=dict)
    marks: Sequence[float] = ()
    chosen: float | None = None
    ticks: Sequence[float] = ()

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


@cache
def load_matplotlib() -> bool:
    """Imports what every figure needs, which takes 0.3 s; if it is not installed, says so once and returns False."""
    logging.getLogger("matplotlib").setLevel(logging.ERROR)  # it logs about its font cache, which helps nobody
    try:
        import_module("matplotlib.figure")
    except ModuleNotFoundError:
        say(f"The report has words in place of figures, which need {not_installed('matplotlib', 'figures')}")
        return False
    return True


def draw(curves: Curves) -> str:
    """The curves as an SVG element; series of few points get markers. Without matplotlib, in words."""

    def plot(axes: Any) -> None:
        from matplotlib.ticker import MaxNLocator, NullLocator, PercentFormatter

        series = {name: thinned(points) for name, points in curves.series.items() if points}
        for number, (name, points) in enumerate(series.items()):
            x, y = zip(*points, strict=True)
            style = LINES[number // len(SERIES) % len(LINES)]
            marker = "o" if len(points) < 30 else ""
            color = SERIES[number % len(SERIES)]
            label = name if len(name) <= MOST_LETTERS else f"…{name[1 - MOST_LETTERS :]}"
            axes.plot(x, y, style, color=color, marker=marker, label=label)
            if name in curves.ranges:
                axes.vlines(x, *zip(*curves.ranges[name], strict=True), color=color)
        for number, mark in enumerate(curves.marks):
            axes.axvline(mark, color=BAD, linestyle=":", label="" if number else "warning")
        if curves.chosen is not None:
            axes.axvline(curves.chosen, color=INK, linestyle="--", linewidth=1, label="chosen")
        axes.set_xlabel(curves.x)
        furthest = max(points[-1][0] for points in series.values())
        axes.xaxis.set_major_locator(MaxNLocator(6, integer=furthest > 3))
        if curves.ticks:
            axes.set_xscale("log")
            axes.set_xticks(curves.ticks, [f"{tick:g}" for tick in curves.ticks], minor=False)
            axes.xaxis.set_minor_locator(NullLocator())
        if curves.logarithmic and any(y > 0 for points in series.values() for _, y in points):
            axes.set_yscale("log")
            write_numbers(axes.yaxis)
        if curves.from_zero:
            axes.set_ylim(bottom=0)
        if curves.percent:
            axes.yaxis.set_major_formatter(PercentFormatter(1.0))
        if len(series) > 1 or curves.marks or curves.chosen is not None:
            axes.legend(loc="best", ncols=1 if len(series) < 5 else 2)

    return drawn(plot, curves.description)


def cloud(points: np.ndarray, labels: np.ndarray, names: Sequence[str], turned: float, description: str) -> str:
    """A 3D scatter plot of points (N, 3), rotated by `turned` degrees around the vertical, as an SVG element; points
    with the same label (N,) have one colour, with the label's name in their middle. Without matplotlib, in words."""

    def plot(axes: Any) -> None:
        for label, name in enumerate(names):
            cluster = points[labels == label]
            if len(cluster):
                axes.plot(*cluster.T, ".", color=f"C{label % 10}", markersize=3.5, alpha=0.7)
                axes.text(*np.median(cluster, axis=0), name, ha="center", va="center", weight="bold", size=11)
        for axis in (axes.xaxis, axes.yaxis, axes.zaxis):
            axis.set_pane_color("none")
        axes.tick_params(labelsize=7, pad=-2)

    return drawn(plot, description, (SIZE[0], 0.85 * SIZE[0]), projection="3d", azim=turned)


def scatter(x_name: str, x: Sequence[Any], y_name: str, y: Sequence[float | None], are_fractions: bool = False) -> str:
    """Values over numbers or names as an SVG element, the first one being the best, with a cross for a missing one.

    Numbers that differ widely are on a logarithmic axis, and so are fractions, which are above 0 and shown in per cent.
    Without matplotlib, in words.
    """
    points = [(one, value) for one, value in zip(x, y, strict=True) if value is not None]
    missing = [one for one, value in zip(x, y, strict=True) if value is None]
    best = f"{points[0][1]:.2%}" if are_fractions else f"{points[0][1]:.4g}"
    said = f"{y_name} by {x_name}: {len(points)} values, the best {best} at {points[0][0]}"

    def plot(axes: Any) -> None:
        from matplotlib.ticker import LogLocator, NullLocator

        axes.plot(*zip(*points, strict=True), "o", color=SERIES[0])
        axes.plot(*points[0], "o", color=SERIES[1], markersize=9, fillstyle="none", label="best")
        if missing:
            top = [0.97] * len(missing)
            axes.plot(missing, top, "x", color=SERIES[4], label="failed", transform=axes.get_xaxis_transform())
        if not isinstance(x[0], str):
            if min(x) > 0 and max(x) >= 10 * min(x):
                axes.set_xscale("log")
            if len(set(x)) <= 6:
                axes.set_xticks(sorted(set(x)))
                axes.xaxis.set_minor_locator(NullLocator())
            write_numbers(axes.xaxis)
        if are_fractions:
            axes.set_yscale("log")
            axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
            write_numbers(axes.yaxis, lambda value, _: f"{100 * value:.3g}%")
        axes.set_xlabel(x_name)
        axes.set_ylabel(y_name)
        axes.legend(loc="best")

    return drawn(plot, f"{said}; {len(missing)} without" if missing else said)


def write_numbers(axis: Any, form: Callable[[float, int], str] = lambda value, _: f"{value:g}") -> None:
    """Labels only the major ticks, and without powers of ten."""
    from matplotlib.ticker import FuncFormatter, NullFormatter

    axis.set_major_formatter(FuncFormatter(form))
    axis.set_minor_formatter(NullFormatter())


def thinned(points: Points) -> list[tuple[float, float]]:
    """At most MOST_POINTS of the points, always including the last one."""
    every = -(-len(points) // MOST_POINTS)
    return list(reversed(list(points)[::-1][::every]))


def drawn(plot: Callable[[Any], None], description: str, size: tuple[float, float] = SIZE, **subplot: Any) -> str:
    """What is plotted on the axes as an SVG element with a text alternative, in the page's colours and font; without
    matplotlib a paragraph. subplot: see Figure.add_subplot."""
    text = html.escape(description)
    if not load_matplotlib():
        return f"<p>{text}</p>"
    import matplotlib
    from matplotlib.figure import Figure

    file = io.StringIO()
    with matplotlib.rc_context(PLOT_STYLE), np.errstate(all="ignore"):
        figure = Figure(figsize=size, layout="constrained")
        plot(figure.add_subplot(**subplot))
        figure.savefig(file, format="svg", transparent=True, metadata={"Date": None})
    svg = file.getvalue()
    svg = re.sub(r"<metadata>.*?</metadata>", "", svg[svg.index("<svg") :], flags=re.DOTALL)
    # the same ids in every figure; those that are referred to are hashes
    svg = re.sub(r' id="[A-Za-z0-9.]+_\d+"', "", svg)
    svg = re.sub("|".join(COLOURS), lambda match: COLOURS[match[0]], svg)
    svg = re.sub(r' (width|height)="[\d.]+pt"', "", svg, count=2)
    return svg.replace("<svg", f'<svg role="img" aria-label="{text}"', 1)


def picture(image: np.ndarray, most: int = 64) -> str:
    """An image (C, H, W) uint8 as a PNG data URI, made smaller where it exceeds most pixels."""
    return "data:image/png;base64," + base64.b64encode(png_of(image, most)).decode()


def png_of(image: np.ndarray, most: int) -> bytes:
    from PIL import Image

    pixels = image.transpose(1, 2, 0) if len(image) == 3 else image[0]
    png = Image.fromarray(np.ascontiguousarray(pixels))
    png.thumbnail((most, most))
    file = io.BytesIO()
    png.save(file, "png", optimize=True)
    return file.getvalue()
