"""The timing study's page: curves, a table, and where it was measured."""

from collections.abc import Sequence
from statistics import median

from flyte_ddp.data.description import DatasetDescription
from flyte_ddp.report.article import Drawing, Section, article, set_up
from flyte_ddp.report.figures import Curves, draw
from flyte_ddp.timing.measurement import METHODS, Measurement, TimingOptions

UNIT = "images per device and batch"


def timing_article(
    timings: Sequence[Measurement], load: float, description: DatasetDescription, options: TimingOptions
) -> str:
    """The page for a Deck; load is the number of processes that were running on this machine before."""
    rates: dict[tuple[str, int], list[float]] = {}
    for one in timings:
        rates.setdefault((one.method, one.batch_size), []).append(one.images_per_second)
    curves = Curves(
        "Images per second",
        {method: [(size, median(rates[method, size])) for size in options.sizes] for method in METHODS},
        remark=f"Medians of {options.repeats} repeats, with their ranges.",
        logarithmic=True,
        x=UNIT,
        ranges={
            method: [(min(rates[method, size]), max(rates[method, size])) for size in options.sizes]
            for method in METHODS
        },
        ticks=options.sizes,
    )
    named = {one.method: f"{one.method} ({one.devices} with {one.threads} threads each)" for one in timings}
    measured = Section(
        "Measured",
        [f"{options.model}, float32, test images of {description.name}: from host memory to scores on the device."],
        [Drawing(curves.title, draw(curves))],
        caption=f"Images per second, median [range] of n = {options.repeats}",
        heads=(UNIT.capitalize(), *(named[method] for method in METHODS)),
        lines=[(str(size), *(spread(rates[method, size]) for method in METHODS)) for size in options.sizes],
    )
    sections = [measured, set_up(("Running processes before", f"{load:.1f}"))]
    return article("Timing of inference", "One device, nn.DataParallel, one process per device", sections)


def spread(rates: Sequence[float]) -> str:
    return f"{median(rates):,.0f} [{min(rates):,.0f}-{max(rates):,.0f}]"
