"""The documentation site: its pages, and in a real browser the site that `make docs` builds."""

import http.server
import re
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator
from functools import partial
from html.parser import HTMLParser
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urljoin, urlsplit

import pytest

import flyte_ddp
from tests.once import made_once
from tests.report.browser import Browser, find_chromium

ROOT = Path(__file__).resolve().parents[1]
ELSEWHERE = "The site needs Python 3.11 or later"


def test_each_page_is_in_the_navigation():
    pages = pytest.importorskip("docs.site.pages", reason=ELSEWHERE)
    listed = pages.listed_pages()
    assert len(listed) == len({*listed})
    own = {f"docs/{page.stem}" for page in ROOT.glob("docs/*.md")} - {pages.LIST}
    assert own <= {*listed}
    assert {"README", "CONTRIBUTING", "CHANGELOG", "SECURITY", "examples/README", "benchmarks/RESULTS"} <= {*listed}
    assert (ROOT / f"{pages.LIST}.md").read_text().count("\n- [") == len(listed), "each says what its page is about"


def test_each_public_name_has_a_place_in_the_api():
    api = pytest.importorskip("docs.site.api", reason=ELSEWHERE)
    groups = api.grouped()
    assert sorted(name for names in groups.values() for name in names) == sorted(flyte_ddp.MODULES)
    assert "More" not in groups, "give the new module a heading in GROUPS"


def test_arguments_in_the_last_lines_become_a_section():
    api = pytest.importorskip("docs.site.api", reason=ELSEWHERE)

    def read(path: str, size: int, *parts: str) -> None:
        """Reads it. Of `a`, *b.

        path: of the file, a.txt: it must be there. size, parts: at
        most as many.
        """

    lines = (read.__doc__ or "").replace("        ", "").splitlines()
    api.lists_of_arguments(None, "function", "read", read, None, lines)
    assert lines == [
        "Reads it. Of ``a``, \\*b.",
        "",
        "Args:",
        "    path: of the file, a.txt: it must be there.",
        "    size: at most as many.",
        "    parts: at most as many.",
        "",
    ]


def built(folder: Path) -> None:
    """By the command of `make docs`, which a warning fails."""
    command = re.findall(r"sphinx-build (.* \. build/site)\)", (ROOT / "Makefile").read_text())[0]
    arguments = command.replace("build/", f"{folder}/").split()
    done = subprocess.run([sys.executable, "-m", "sphinx", *arguments], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@pytest.fixture(scope="module")
def site() -> Path:
    pytest.importorskip("sphinx", reason=ELSEWHERE)
    return made_once("site", built) / "site"


class Links(HTMLParser):
    """What a page links to and loads, and the places in it."""

    def __init__(self, page: Path):
        super().__init__()
        self.links: list[str] = []
        self.loaded: list[str] = []
        self.places = {""}
        self.feed(page.read_text())

    def handle_starttag(self, tag: str, attrs: "list[tuple[str, str | None]]") -> None:
        values = {name: value or "" for name, value in attrs}
        self.places |= {values.get("id", "")}
        if tag == "a" and "href" in values:
            self.links.append(values["href"])
        if tag in ("link", "script", "img"):
            self.loaded += [values[name] for name in ("href", "src") if name in values]


@pytest.mark.slow
def test_the_site_is_whole(site):
    """No link leads nowhere, nothing is loaded from another host, and each public name is described."""
    pages = {str(page.relative_to(site)): Links(page) for page in site.rglob("*.html")}
    assert len(pages) > 100
    broken, foreign = [], []
    for name, page in pages.items():
        foreign += [one for one in page.loaded if urlsplit(one).netloc]
        for link in [*page.links, *page.loaded]:
            to = urlsplit(urljoin(name, unquote(link)))
            if to.scheme or to.netloc:
                continue
            path, place = to.path, to.fragment
            if not (site / path).is_file() or (path in pages and place not in pages[path].places):
                broken.append(f"{name}: {link}")
    assert not broken
    assert not foreign
    described = pages["docs/api.html"].places
    assert {f"flyte_ddp.{name}" for name in flyte_ddp.MODULES} <= described
    assert {"flyte_ddp.Recipe.measure", "flyte_ddp.RecipeTraining.run", "flyte_ddp.Loop.keep"} <= described
    assert {"docs/notebook.ipynb", "llms-full.txt"} <= {str(file.relative_to(site)) for file in site.rglob("*")}
    listed = re.findall(r"\]\((.+?)\)", (site / "llms.txt").read_text())
    assert len(listed) > 25
    assert not [page for page in listed if not (site / page).is_file()]
    assert str(ROOT) not in (site / "docs" / "api.html").read_text()


@pytest.fixture(scope="module")
def address(site) -> Iterator[str]:
    class Quiet(http.server.SimpleHTTPRequestHandler):
        def log_message(self, format: str, *args: Any) -> None: ...

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), partial(Quiet, directory=str(site))) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


@pytest.mark.slow
@pytest.mark.skipif(find_chromium() is None, reason="needs Chromium")
def test_a_browser_shows_it_and_finds_words(address, tmp_path):
    with Browser(find_chromium() or "", tmp_path) as browser:
        browser.open(f"{address}/index.html")
        assert "Multi-GPU PyTorch training on Flyte" in browser.evaluate("document.querySelector('h1').textContent")
        names = browser.evaluate("[...document.querySelectorAll('.sidebar-tree a')].map(link => link.textContent)")
        assert {"A tour", "Your own model", "On a cluster", "Python API", "Changelog"} <= {*names}
        assert browser.evaluate("document.querySelectorAll('button.copybtn').length") > 3
        light = browser.evaluate("getComputedStyle(document.body).backgroundColor")
        browser.open(f"{address}/docs/reference.html", width=400, dark=True)
        assert browser.evaluate("getComputedStyle(document.body).backgroundColor") != light
        for page in ("index", "docs/reference", "docs/clouds", "docs/api", "docs/notebook"):
            browser.open(f"{address}/{page}.html", width=400)
            assert browser.evaluate("document.documentElement.scrollWidth") <= 400, page
        browser.open(f"{address}/search.html?q=micro_batch")
        found = """new Promise(done => { const look = () => {
            const links = [...document.querySelectorAll('#search-results li a')].map(link => link.textContent);
            const said = document.querySelector('.search-summary')?.textContent ?? '';
            said.includes('finished') ? done(links) : setTimeout(look, 50) }; look() })"""
        assert "Your own model" in browser.evaluate(found)
    hosts = {urlsplit(request).netloc for request in browser.requests if not request.startswith("data:")}
    assert hosts == {urlsplit(address).netloc}
    assert not [message for message in browser.messages if "favicon" not in message]


@pytest.mark.skipif(shutil.which("git") is None, reason="needs git")
def test_what_is_built_is_not_kept():
    ignored = subprocess.run(["git", "check-ignore", "build/site", "build/doctrees"], cwd=ROOT, capture_output=True)
    assert ignored.returncode == 0 or not (ROOT / ".git").exists()
