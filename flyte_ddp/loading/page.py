"""The loading study's page: what was measured, what to set, and one batch to look at."""

from collections.abc import Sequence

import numpy as np

from flyte_ddp.data.description import DatasetDescription
from flyte_ddp.loading.times import LoadingTimes, Measured
from flyte_ddp.report.article import Drawing, Section, article
from flyte_ddp.report.figures import Curves, draw, picture

MOST_PICTURES = 32
HEADS = ("Workers, memory", "Images/s, median", "Least", "Most", "Seconds per pass, median")


def loading_page(
    description: DatasetDescription, times: LoadingTimes, best: Measured, images: np.ndarray, labels: np.ndarray
) -> str:
    """The content of <body>. images: (n, C, H, W) uint8, of one batch; labels: (n,)."""
    kinds = {kind: [one for one in times.measured if _memory(one) == kind] for kind in ("pageable", "pinned")}
    curves = _curves(kinds, best)
    shown = [
        (picture(image), description.classes[label])
        for image, label in zip(images[:MOST_PICTURES], labels[:MOST_PICTURES], strict=True)
    ]
    sections = [
        Section("What to set", paragraphs=(_advice(best),)),
        Section(
            "Measured",
            paragraphs=_method(description, times),
            figures=(Drawing(curves.title, draw(curves)),),
            caption="By setting",
            heads=HEADS,
            lines=_lines(kinds["pageable"], kinds["pinned"]),
        ),
        Section(f"One batch: the first {len(shown)} of {len(images)} images", pictures=shown),
    ]
    return article("Loading images", f"{description.name}, {len(description.classes)} classes", sections)


def _curves(kinds: dict[str, list[Measured]], best: Measured) -> Curves:
    return Curves(
        f"Images per second, median and range of {len(best.seconds)} passes",
        {kind: [(float(one.workers), one.rate) for one in ones] for kind, ones in kinds.items() if ones},
        f"Recommended: {best.workers} workers, {_memory(best)} memory.",
        from_zero=True,
        x="loader workers",
        ranges={kind: [(min(one.rates), max(one.rates)) for one in ones] for kind, ones in kinds.items() if ones},
    )


def _advice(best: Measured) -> str:
    return (
        f'Train with --options \'{{"loader_workers": {best.workers}, "pin_memory": {str(best.pin_memory).lower()}}}\': '
        f"{best.rate:,.0f} images per second, with the fewest workers whose median is within the range of the fastest "
        "setting's passes."
    )


def _method(description: DatasetDescription, times: LoadingTimes) -> tuple[str, str]:
    """How it was measured, and what the images take in memory."""
    shape = " x ".join(map(str, description.image_shape))
    decoded = description.train_samples * int(np.prod(description.image_shape))
    how = (
        f"In each pass, one rank decodes {times.measured[0].images:,} of {description.train_samples:,} training images "
        f"to {shape} and copies them to the device ({times.device}); starting and ending its workers is included. The "
        "settings took turns, after a first pass that was not counted. Nothing else ran in the rank: during training "
        "on the same cores, the workers get less of them."
    )
    memory = (
        f"Decoded, all training images would take {decoded / 2**20:,.0f} MiB; no process used more than "
        f"{times.peak_bytes / 2**20:,.0f} MiB."
    )
    return how, memory


def _memory(one: Measured) -> str:
    return "pinned" if one.pin_memory else "pageable"


def _lines(pageable: Sequence[Measured], pinned: Sequence[Measured]) -> list[list[str]]:
    lines = [
        [
            f"{one.workers}, {_memory(one)}",
            *(f"{rate:,.0f}" for rate in (one.rate, min(one.rates), max(one.rates))),
            f"{one.images / one.rate:.2f}",
        ]
        for one in (*pageable, *pinned)
    ]
    return lines if pinned else [*lines, ["any, pinned", "not measured: no GPU", "", "", ""]]
