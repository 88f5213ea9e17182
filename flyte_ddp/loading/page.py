"""The loading study's page: what to set, and what was measured."""

import math

from flyte_ddp.data.description import DatasetDescription
from flyte_ddp.loading.times import LoadingTimes, TimedSetting
from flyte_ddp.report.article import Drawing, Section, article
from flyte_ddp.report.figures import Curves, draw

HEADS = ("Workers, memory", "Images/s, median", "Least", "Most", "Seconds per pass, median")


def loading_page(description: DatasetDescription, times: LoadingTimes, best: TimedSetting) -> str:
    """The content of <body>."""
    by_memory: dict[str, list[TimedSetting]] = {}
    for one in times.settings:
        by_memory.setdefault(one.memory, []).append(one)
    curves = Curves(
        f"Images per second, median and range of {len(best.seconds)} passes",
        {memory: [(float(one.workers), one.rate) for one in ones] for memory, ones in by_memory.items()},
        f"Recommended: {best.workers} workers, {best.memory} memory.",
        from_zero=True,
        x="loader workers",
        ranges={memory: [(min(one.rates), max(one.rates)) for one in ones] for memory, ones in by_memory.items()},
    )
    lines = [
        [
            f"{one.workers}, {memory}",
            *(f"{rate:,.0f}" for rate in (one.rate, min(one.rates), max(one.rates))),
            f"{one.images / one.rate:.2f}",
        ]
        for memory, ones in by_memory.items()
        for one in ones
    ]
    if "pinned" not in by_memory:
        lines.append(["any, pinned", "not measured: no GPU", "", "", ""])
    pinned = str(best.pin_memory).lower()
    advice = (
        f'Train with --options \'{{"loader_workers": {best.workers}, "pin_memory": {pinned}}}\': {best.rate:,.0f} '
        "images per second, with the fewest workers whose median is within the range of the fastest setting's passes."
    )
    figures = [Drawing(curves.title, draw(curves))]
    sections = [
        Section("What to set", [advice]),
        Section("Measured", _method(description, times), figures, "By setting", HEADS, lines),
    ]
    return article("Loading images", f"{description.name}, {len(description.classes)} classes", sections)


def _method(description: DatasetDescription, times: LoadingTimes) -> tuple[str, str]:
    """How it was measured, and what the images take in memory."""
    shape = " x ".join(map(str, description.image_shape))
    decoded = description.train_samples * math.prod(description.image_shape)
    how = (
        f"In each pass, one rank decodes {times.settings[0].images:,} of {description.train_samples:,} training images "
        f"to {shape} and copies them to the device ({times.device}); starting and ending its workers is included. The "
        "settings took turns, after a first pass that was not counted. Nothing else ran in the rank: during training "
        "on the same cores, the workers get less of them."
    )
    memory = (
        f"Decoded, all training images would take {decoded / 2**20:,.0f} MiB; no process used more than "
        f"{times.peak_bytes / 2**20:,.0f} MiB."
    )
    return how, memory
