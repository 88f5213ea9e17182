"""A page with matplotlib's figures, as a task's Deck and as a file."""

import io
from pathlib import Path

from flytekit import Deck, current_context
from flytekit.types.file import FlyteFile
from matplotlib.figure import Figure


def show(title: str, text: str, *figures: Figure) -> FlyteFile:
    parts = [f"<h1>{title}</h1><p>{text}</p>"]
    for figure in figures:
        drawn = io.StringIO()
        figure.savefig(drawn, format="svg", bbox_inches="tight")
        parts.append(drawn.getvalue().partition("?>")[2])  # without XML's first line
    page = "\n".join(parts)
    Deck(title, page)
    path = Path(current_context().working_directory, "report.html")
    path.write_text(f"<!doctype html><meta charset='utf-8'><title>{title}</title>{page}")
    return FlyteFile(str(path))
