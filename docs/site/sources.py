"""Links from pages and docstrings to files of the repository: each of these files is a page of the site, highlighted.

So they lead to the code of this very version, wherever the repository is, and without a network.
"""

import inspect
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from docutils import nodes
from pygments.lexers import get_lexer_for_filename
from pygments.util import ClassNotFound
from sphinx import addnodes
from sphinx.transforms import SphinxTransform

import flyte_ddp

ROOT = Path(__file__).parents[2]
linked: set[Path] = set()  # by the pages that this process reads: all of them, as `make docs` keeps nothing between


def address(path: Path, page: str) -> str:
    """The address of a file's or folder's page, as seen from another page; from now on it has one."""
    linked.add(path)
    return f"{'../' * page.count('/')}source/{path.relative_to(ROOT)}.html"


class LinksToFiles(SphinxTransform):
    """What MyST has made downloads of, and what it has not found because it is a folder."""

    default_priority = 500

    def apply(self, **_: Any) -> None:
        for node in [
            *self.document.findall(addnodes.download_reference),
            *self.document.findall(addnodes.pending_xref),
        ]:
            page = self.env.docname
            path = Path(os.path.normpath(ROOT / Path(page).parent / node["reftarget"]))
            if node.tagname == "download_reference" or path.is_dir():
                link = nodes.reference("", "", *node.children, refuri=address(path, page), internal=True)
                node.replace_self(link)


def linkcode_resolve(domain: str, info: dict[str, str]) -> str | None:
    """The place of a public name in its file, for the page of the API."""
    value: Any = flyte_ddp
    for name in info["fullname"].split("."):
        value = getattr(value, name, None)
    value = inspect.unwrap(value) if callable(value) else getattr(value, "fget", None)
    try:
        path, (_, line) = inspect.getsourcefile(value), inspect.getsourcelines(value)
    except (OSError, TypeError):  # an alias
        return None
    return f"{address(Path(path or ''), 'docs/api')}#line-{line}"


def source_pages(app: Any) -> Iterator[tuple[str, dict[str, Any], str]]:
    """The files that are linked, those of folders that are linked, and the folders themselves."""
    folders = {path for path in linked if path.is_dir()}
    inside = {
        folder: [path for path in sorted(folder.iterdir()) if path.suffix in (".py", ".yaml")] for folder in folders
    }
    for path in sorted({*linked, *(path for files in inside.values() for path in files)}):
        name = str(path.relative_to(ROOT))
        if path in folders:
            links = (f'<li><a href="{path.name}/{each.name}.html">{each.name}</a></li>' for each in inside[path])
            body = f"<ul>{''.join(links)}</ul>"
        else:
            try:
                lexer = get_lexer_for_filename(name).aliases[0]
            except ClassNotFound:
                lexer = "none"
            block = app.builder.highlighter.highlight_block
            body = block(path.read_text(), lexer, linenos="inline", lineanchors="line", anchorlinenos=True)
        yield f"source/{name}", {"title": name, "body": f"<h1>{name}</h1>\n{body}", "metatags": ""}, "page.html"


def setup(app: Any) -> dict[str, Any]:
    app.add_transform(LinksToFiles)
    app.config.linkcode_resolve = linkcode_resolve
    app.connect("html-collect-pages", source_pages)
    return {}
