"""A plot as an SVG element, in the colours and the font of the page around it."""

import html
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

WIDTH, HEIGHT = 460, 290  # the page scales the plot; the text can be read even on a page 360 pixels wide
FONT = 13  # the size of letters
LETTER = 7.0  # an estimate of letters' mean width, which only a browser knows
LINE = 18  # the height of a line
MOST_LETTERS = 24  # a longer name in a legend loses its beginning
MOST_TICKS = 7

Points = Sequence[tuple[float, float]]


@dataclass(frozen=True)
class Axis:
    """The positions of values on an axis, and the labels of some.

    Attributes:
        low, high: the values at the axis's ends; their logarithms if the axis is logarithmic.
        begin, end: the positions of the axis's ends.
        labels: labels by value.
    """

    low: float
    high: float
    begin: float
    end: float
    labels: Mapping[float, str]
    logarithmic: bool = False

    def __call__(self, value: float) -> float:
        """Return the position of a value; NaN if the value has none."""
        if not math.isfinite(value) or (self.logarithmic and value <= 0):
            return math.nan
        shown = math.log10(value) if self.logarithmic else value
        # Both numbers are halved, because the difference of two large ones may exceed the largest float
        return self.begin + (shown / 2 - self.low / 2) / (self.high / 2 - self.low / 2) * (self.end - self.begin)

    @property
    def last(self) -> float:
        """Return the value at the end of the axis."""
        return 10.0**self.high if self.logarithmic else self.high


def make_axis(
    values: Iterable[float],
    begin: float,
    end: float,
    write: Callable[[float], str] = lambda value: f"{value:,.10g}",
    logarithmic: bool = False,
    from_zero: bool = False,
    integer: bool = False,
    ticks: Sequence[float] = (),
) -> Axis:
    """Build an axis that spans the values, with a margin and labels at round numbers.

    Args:
        values: the values. Values that are not finite are ignored, and on a logarithmic axis also values that are not
            positive. If no value is left, the axis spans about 0 to 1.
        begin: the coordinate in the drawing where the axis begins.
        end: the coordinate in the drawing where the axis ends.
        write: write(value) returns the label of a value.
        logarithmic: whether the axis is logarithmic. Without positive values it is linear all the same.
        from_zero: whether the axis begins at 0, or at 1 if it is logarithmic. Some value must be above that.
        integer: whether only whole numbers get labels. The values must then differ by at least 1. A logarithmic axis
            ignores this.
        ticks: the values to label; by default round numbers.
    """
    shown = [value for value in values if math.isfinite(value)]
    logarithmic = logarithmic and any(value > 0 for value in shown)
    if logarithmic:
        shown = [math.log10(value) for value in shown if value > 0]
    low = min(shown, default=0.0)
    high = max(shown, default=1.0)
    margin = (high / 2 - low / 2) * 0.1
    if margin <= 1e-10 * (1.0 if logarithmic else max(abs(low), abs(high))):  # the values differ by rounding at most
        margin = max(abs(high) * 0.1, 0.5 * logarithmic) or 0.5
    low = 0.0 if from_zero else low - margin
    high = high + margin
    ticks = ticks or (round_powers(low, high) if logarithmic else round_numbers(low, high, integer))
    return Axis(low, high, begin, end, {tick: write(tick) for tick in ticks}, logarithmic)


def round_numbers(low: float, high: float, integer: bool = False) -> list[float]:
    """Return at most MOST_TICKS round numbers from low to high, at equal distances of 1, 2, 2.5 or 5 x a power of ten.

    Args:
        low: the least number to return.
        high: the largest number to return; it must be above low.
        integer: whether to return whole numbers alone. Then high must be at least 1 above low.
    """
    magnitude = 10.0 ** math.floor(math.log10(high / MOST_TICKS - low / MOST_TICKS))
    steps = [factor * magnitude for factor in (1, 2, 2.5, 5, 10, 20)]
    step = next(step for step in steps if high / step - low / step < MOST_TICKS and not (integer and step % 1))
    return [number * step for number in range(math.ceil(low / step), math.floor(high / step) + 1)]


def round_powers(low: float, high: float) -> list[float]:
    """Return the values to label on a logarithmic axis, ascending: the values, not their logarithms.

    If more than two powers of ten are on the axis, the values are at most MOST_TICKS of these powers, evenly spaced.
    Otherwise, they are 1, 2 and 5 times powers of ten or, if fewer than two such are on the axis, round numbers.

    Args:
        low: the logarithm to base 10 of the axis's first value.
        high: the logarithm to base 10 of the axis's last value; it must be above low.
    """
    powers = range(max(math.ceil(low), -300), min(math.floor(high), 300) + 1)
    if len(powers) > 2:
        return [10.0**power for power in powers[:: -(-len(powers) // MOST_TICKS)]]
    between: list[float] = []
    for power in range(math.floor(low), math.floor(high) + 1):
        between += [10.0**power, 2 * 10.0**power, 5 * 10.0**power]
    found = [tick for tick in between if low <= math.log10(tick) <= high]
    return found if len(found) > 1 else round_numbers(10.0**low, 10.0**high)


class Plot:
    """Axes with lines and symbols, and a legend above them. Later parts cover earlier ones.

    Attributes:
        top, bottom, right: where the axes may end.
    """

    def __init__(self, legend: Sequence[tuple[str, str]] = ()):
        """Draw the legend.

        Args:
            legend: names with their symbols, which are SVG elements around (0, 0), 20 wide.
        """
        self._parts: list[str] = []
        x = 0.0
        y = 0.6 * LINE
        for name, symbol in legend:
            shown = name if len(name) <= MOST_LETTERS else f"…{name[1 - MOST_LETTERS :]}"
            width = 40 + LETTER * len(shown)
            if x and x + width > WIDTH:
                x = 0.0
                y = y + LINE
            self._put(x + 12, y, symbol)
            self._write(x + 26, y, shown)
            x += width
        self.top = y + 0.6 * LINE if legend else 8.0
        self.bottom = HEIGHT - 2.4 * LINE
        self.right = WIDTH - 12.0

    def vertical(self, values: Sequence[float], **how: Any) -> Axis:
        """Build the vertical axis; make_axis has the arguments."""
        return make_axis(values, self.bottom, self.top, **how)

    def horizontal(self, values: Sequence[float], beside: Axis, **how: Any) -> Axis:
        """Build the horizontal axis, which begins where the labels of the vertical one end."""
        left = 12 + 1.15 * LETTER * max(map(len, beside.labels.values()), default=0)
        return make_axis(values, left, self.right, **how)

    def axes(self, x: Axis, y: Axis, name: str) -> None:
        """Draw the grid, the labels of both axes, and a name below the horizontal axis.

        Call this method before line(), across() and symbols(), which use these axes.
        """
        self._x = x
        self._y = y
        for value, label in y.labels.items():
            self._rule(x.begin, y(value), x.end, y(value))
            self._write(x.begin - 6, y(value), label, "end")
        for value, label in x.labels.items():
            self._rule(x(value), y.begin, x(value), y.end)
            self._write(x(value), y.begin + 0.8 * LINE, label, "middle")
        self._write((x.begin + x.end) / 2, HEIGHT - 0.5 * LINE, name, "middle")

    def line(self, points: Points, pen: str) -> None:
        """Draw a line through the points, interrupted at points that have no position on an axis, such as NaN.

        Args:
            points: pairs of x and y.
            pen: SVG attributes of the line, such as stroke="red".
        """
        path = ""
        command = "M"
        for x, y in points:
            at = self._x(x), self._y(y)
            is_shown = math.isfinite(sum(at))
            path += f"{command}{at[0]:.1f} {at[1]:.1f}" if is_shown else ""
            command = "L" if is_shown else "M"
        self._parts.append(f'<path d="{path}" fill="none" {pen}/>')

    def across(self, x: float, pen: str) -> None:
        """Draw a vertical line at x."""
        self._rule(self._x(x), self._y.begin, self._x(x), self._y.end, pen)

    def symbols(self, points: Points, symbol: str) -> None:
        for x, y in points:
            if math.isfinite(self._x(x) + self._y(y)):
                self._put(self._x(x), self._y(y), symbol)

    def svg(self, description: str) -> str:
        """Return the plot as the text of an SVG element, with a description as its text alternative."""
        head = f'<svg role="img" aria-label="{html.escape(description)}" xmlns="http://www.w3.org/2000/svg" '
        box = f'viewBox="0 0 {WIDTH} {HEIGHT}" font-size="{FONT}" fill="var(--ink)"'
        return f"{head}{box}>{''.join(self._parts)}</svg>"

    def _rule(self, x1: float, y1: float, x2: float, y2: float, pen: str = 'stroke="var(--line)"') -> None:
        self._parts.append(f'<path d="M{x1:.1f} {y1:.1f}L{x2:.1f} {y2:.1f}" {pen}/>')

    def _put(self, x: float, y: float, symbol: str) -> None:
        self._parts.append(f'<g transform="translate({x:.1f} {y:.1f})">{symbol}</g>')

    def _write(self, x: float, y: float, text: str, anchor: str = "start") -> None:
        place = f'x="{x:.1f}" y="{y + 0.35 * FONT:.1f}" text-anchor="{anchor}"'
        self._parts.append(f"<text {place}>{html.escape(text)}</text>")
