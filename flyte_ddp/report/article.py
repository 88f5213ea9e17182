"""Pages of headings, text, tables, curves and pictures in the style of the training report; each is one file."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from flyte_ddp.report import page
from flyte_ddp.report.surroundings import surroundings
from flyte_ddp.text import encodable

BODY = """
<main class="ddp">
<div class="top"><h1>{{ title }}</h1></div>
{% if subtitle %}<p class="soft">{{ subtitle }}</p>{% endif %}
{% for section in sections %}
{% if section.title %}<h2>{{ section.title }}</h2>{% endif %}
{% for text in section.paragraphs %}<p>{{ text }}</p>{% endfor %}
<div class="grid">
{% for shown in section.figures %}{{ figure(shown) }}{% endfor %}
{% if section.heads %}{{ grid_table(section.caption or section.title, section.heads, section.lines) }}
{% elif section.lines %}{{ table(section.caption, section.lines, True) }}
{% endif %}
</div>
{% if section.pictures %}{{ gallery(section.pictures) }}{% endif %}
{% endfor %}
</main>
"""


class Drawing(NamedTuple):
    """A figure with its title: an SVG element, as the functions of flyte_ddp.report.figures return it."""

    title: str
    svg: str


@dataclass(frozen=True)
class Section:
    """A part of an article: paragraphs, figures, a table and pictures, in this order. Each may be left out.

    Attributes:
        heads, lines: the table's heads and lines. The first column names the line, the others are right-aligned.
            Without heads, lines are (label, text).
        pictures: (data URI, label), with URIs from figures.picture.
    """

    title: str
    paragraphs: Sequence[str] = ()
    figures: Sequence[Drawing] = ()
    caption: str = ""
    heads: Sequence[str] = ()
    lines: Sequence[Sequence[str]] = ()
    pictures: Sequence[tuple[str, str]] = ()


def setup_section(*facts: tuple[str, str]) -> Section:
    """Return the section with the inputs, (label, text) each, and with versions and hardware of this machine."""
    return Section("Set-up", caption="Inputs and environment", lines=[*facts, *surroundings().items()])


def article(title: str, subtitle: str, sections: Sequence[Section]) -> str:
    """Render a page of these sections as the content of <body>, for a Deck. All except the figures is escaped."""
    return render_body(BODY, title=title, subtitle=subtitle, sections=sections)


def render_body(template: str, **values: Any) -> str:
    """Return the content of <body> in the style of the report. The template may use the report's macros."""
    return _render(f"<style>{page.STYLE}</style>{page.MACROS}{template}", **values)


def document(title: str, fragment: str, live: bool = False) -> str:
    """Return the whole HTML page around a fragment. The page loads nothing from the network.

    Args:
        title: the page's title.
        fragment: the content of <body>, which is not escaped.
        live: whether the page reloads itself every few seconds.
    """
    return _render(page.PAGE, title=title, fragment=fragment, live=live)


def _render(template: str, **values: Any) -> str:
    """Fill in a Jinja template.

    Values are escaped for HTML unless the template calls them safe. Characters that UTF-8 lacks are escaped, too.

    Raises:
        jinja2.UndefinedError: The template names a value that is not given.
    """
    from jinja2 import Environment, StrictUndefined

    environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True)
    return encodable(environment.from_string(template).render(values))
