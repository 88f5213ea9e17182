"""The site's pages in their order, which docs/README.md is the list of, and the same for language models."""

import re
import shutil
from pathlib import Path
from typing import Any, NamedTuple

import jupytext

from docs.site import api

ROOT = Path(__file__).parents[2]
LIST = "docs/README"
NOTEBOOK = "docs/notebook"


class Section(NamedTuple):
    """A heading of the list, and its items: (title, page, what it says)."""

    title: str
    items: list[tuple[str, str, str]]


def sections() -> list[Section]:
    """A page is named as Sphinx does: its path in the repository, without .md."""
    found = []
    text = re.sub(r"\n +", " ", (ROOT / f"{LIST}.md").read_text())
    for title, body in re.findall(r"^## (.+)\n((?:(?!## ).*\n?)*)", text, re.MULTILINE):
        links = re.findall(r"^- \[(.+?)\]\((.+?)\.md\): (.+)$", body, re.MULTILINE)
        items = [(name, (ROOT / "docs" / page).resolve(), says) for name, page, says in links]
        found.append(Section(title, [(name, str(page.relative_to(ROOT)), says) for name, page, says in items]))
    return found


def listed_pages() -> list[str]:
    return [page for section in sections() for _, page, _ in section.items]


def add_navigation(app: Any, page: str, source: list[str]) -> None:
    """Gives the first page the tables of contents that make the sidebar."""
    if page == LIST:  # it is the sidebar, and not in it
        source[0] = f"---\norphan: true\n---\n{source[0]}"
    if page == NOTEBOOK:
        source[0] = source[0].replace("`notebook.ipynb`", '<a href="notebook.ipynb" download>notebook.ipynb</a>')
    if page == app.config.root_doc:
        for section in sections():
            items = [f"{title} <{'self' if each == page else each}>" for title, each, _ in section.items]
            lines = [":hidden:", f":caption: {section.title}", "", *items]
            source[0] += "\n```{toctree}\n" + "\n".join(lines) + "\n```\n"


def write_others(app: Any, error: Exception | None) -> None:
    """What is no page: the notebook, and for language models llms.txt (llmstxt.org), which lists the pages' sources,
    and llms-full.txt, which has all of them. The first page is also at the site's own address."""
    if error:
        return
    site = Path(app.outdir)
    shutil.copy(site / f"{app.config.root_doc}.html", site / "index.html")
    jupytext.write(jupytext.read(ROOT / f"{NOTEBOOK}.md"), site / f"{NOTEBOOK}.ipynb")
    description = re.search(r'^description = "(.*)"', (ROOT / "pyproject.toml").read_text(), re.MULTILINE)
    assert description
    listing, everything = [f"# {app.config.project}\n\n> {description[1]}\n"], []
    for section in sections():
        listing.append(f"\n## {section.title}\n\n")
        for title, page, says in section.items:
            text = (ROOT / f"{page}.md").read_text() + (api.as_text() if page == api.PAGE else "")
            (site / f"{page}.md").write_text(text)
            listing.append(f"- [{title}]({page}.md): {says}\n")
            everything.append(f"<!-- {page}.md -->\n\n{text}\n\n")
    (site / "llms.txt").write_text("".join(listing))
    (site / "llms-full.txt").write_text("".join(everything))


def setup(app: Any) -> dict[str, Any]:
    app.connect("source-read", add_navigation)
    app.connect("build-finished", write_others)
    return {"parallel_read_safe": True}
