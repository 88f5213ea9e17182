"""What a real browser makes of the report of a real run."""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from flyte_ddp.report.report import fragment
from tests.report.browser import Browser, find_chromium
from tests.report.conftest import HOSTILE, Recorded

LOOK = """(() => {
  const shown = element => { const box = element.getBoundingClientRect(); return box.width > 20 && box.height > 20 };
  return {
    title: document.title,
    heading: document.querySelector('h1').textContent,
    scripts: document.scripts.length,
    handlers: document.querySelectorAll('[onerror], [onload], [onclick]').length,
    figures: [...document.querySelectorAll('figure > svg')].filter(shown).map(svg => svg.getAttribute('aria-label')),
    curves: document.querySelectorAll('figure > svg path').length,
    pictures: [...document.images].filter(image => shown(image) && image.naturalWidth > 0).map(image => image.alt),
    broken: [...document.images].filter(image => !image.naturalWidth).length,
    cells: document.querySelectorAll('.confusion tbody td').length,
    width: document.documentElement.scrollWidth,
    unnamed: document.querySelectorAll('table:not(:has(caption)):not([aria-labelledby])').length,
  };
})()"""

# The WCAG contrast of each text with what is behind it, below the 4.5 that it asks for (3 where the text is large)
FAINT = """(() => {
  const parse = colour => [...colour.match(/[\\d.]+/g).map(Number), 1].slice(0, 4);
  const over = (a, b) => [0, 1, 2].map(i => a[i] * a[3] + b[i] * (1 - a[3])).concat(1);
  const linear = v => v <= 10 ? v / 255 / 12.92 : ((v / 255 + .055) / 1.055) ** 2.4;
  const light = c => .2126 * linear(c[0]) + .7152 * linear(c[1]) + .0722 * linear(c[2]);
  const ground = element => !element ? [255, 255, 255, 1]
    : over(parse(getComputedStyle(element).backgroundColor), ground(element.parentElement));
  const faint = [];
  for (const element of document.querySelectorAll('.ddp *')) {
    const text = [...element.childNodes].filter(n => n.nodeType == 3).map(n => n.data.trim()).join('');
    if (!text || element.closest('style')) continue;
    const style = getComputedStyle(element), below = ground(element);
    const colour = over(parse(element instanceof SVGElement ? style.fill : style.color), below);
    const [a, b] = [light(colour), light(below)].sort((x, y) => y - x), ratio = (a + .05) / (b + .05);
    const size = parseFloat(style.fontSize), large = size >= 24 || (size >= 18.6 && style.fontWeight >= 700);
    if (ratio < (large ? 3 : 4.5)) faint.push(`${text.slice(0, 30)}: ${ratio.toFixed(2)}`);
  }
  return faint;
})()"""


@pytest.fixture(scope="session")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    program = find_chromium()
    if not program:
        pytest.skip("needs Chromium: apt install chromium")
    with Browser(program, tmp_path_factory.mktemp("profile")) as opened:
        yield opened


@pytest.mark.parametrize(("width", "dark"), [(360, False), (800, True), (1400, False)])
def test_browser_shows_the_page(browser: Browser, page: Path, width: int, dark: bool):
    browser.messages.clear()
    browser.requests.clear()
    browser.open(page, width, dark)
    seen: Any = browser.evaluate(LOOK)
    assert browser.messages == []
    assert {address.partition(":")[0] for address in browser.requests} <= {"file", "data"}
    assert seen["title"] == f"Finished: training on {HOSTILE}"
    assert seen["heading"] == f"Training on {HOSTILE}"
    assert (seen["scripts"], seen["handlers"]) == (0, 0)
    assert [label.partition(" over epochs")[0] for label in seen["figures"]] == [
        "Loss", "Accuracy", "Learning rate", "Images per second, all ranks", "Gradient norm by layer",
    ]  # fmt: skip
    assert seen["curves"] > 50
    assert sum(alt.startswith("Training image of class ") for alt in seen["pictures"]) == 20
    assert sum(alt.startswith("Test image ") for alt in seen["pictures"]) > 0
    assert (seen["broken"], seen["unnamed"], seen["cells"]) == (0, 0, 100)
    assert seen["width"] <= width, "nobody should have to scroll sideways"
    faint: list[str] = browser.evaluate(FAINT)
    assert faint == []


def test_browser_shows_the_deck(browser: Browser, recorded: Recorded, tmp_path: Path):
    """In Flyte's own frame, but for its fonts, which that takes from the network."""
    from flytekit.deck.deck import get_deck_template

    frame = re.sub(r"<link[^>]*>", "", get_deck_template().template)
    body = f"<div>{fragment(recorded.record)}</div>"
    path = tmp_path / "deck.html"
    path.write_text(frame.replace("$NAV_HTML", "<li>Training</li>").replace("$BODY_HTML", body))
    browser.messages.clear()
    browser.open(path, 800)
    seen: Any = browser.evaluate(LOOK)
    assert browser.messages == []
    assert (len(seen["figures"]), seen["broken"], seen["cells"]) == (5, 0, 100)
