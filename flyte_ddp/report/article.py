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
{% if section.output %}
<div class="card wide"><div class="scroll" tabindex="0" role="region" aria-label="{{ section.title }}"><pre>
{{ section.output }}</pre></div></div>
{% endif %}
</div>
{% if section.pictures %}{{ gallery(section.pictures) }}{% endif %}
{% endfor %}
</main>
"""


class Drawing(NamedTuple):
    """A figure: an SVG element, as the functions of flyte_ddp.report.figures return it."""

    title: str
    svg: str


@dataclass(frozen=True)
class Section:
    """A part of an article, in this order: paragraphs, figures, a table, output, pictures; each may be left out.

    Attributes:
        heads, lines: of the table; the first column names the line, the others are right-aligned. Without heads, lines
            are (label, text).
        output: of a command, shown as it is.
        pictures: (data URI, label), with URIs from figures.picture.
    """

    title: str
    paragraphs: Sequence[str] = ()
    figures: Sequence[Drawing] = ()
    caption: str = ""
    heads: Sequence[str] = ()
    lines: Sequence[Sequence[str]] = ()
    output: str = ""
    pictures: Sequence[tuple[str, str]] = ()


def set_up(*facts: tuple[str, str]) -> Section:
    """The section of what was asked for, and where it ran."""
    return Section("Set-up", caption="Inputs and environment", lines=[*facts, *surroundings().items()])


def article(title: str, subtitle: str, sections: Sequence[Section]) -> str:
    """The content of <body>, for a Deck; everything except the figures is escaped."""
    return render_body(BODY, title=title, subtitle=subtitle, sections=sections)


def render_body(template: str, **values: Any) -> str:
    """The content of <body> in the style of the report, whose macros the template may use."""
    return _render(f"<style>{page.STYLE}</style>{page.MACROS}{template}", **values)


def document(title: str, fragment: str, live: bool = False) -> str:
    """The whole page around a fragment, which loads nothing from the network; a live one reloads itself every few
    seconds.
    """
    return _render(page.PAGE, title=title, fragment=fragment, live=live)


def _render(template: str, **values: Any) -> str:
    """Fill in a template; whatever it does not call safe is escaped, also what no file could hold."""
    from jinja2 import Environment, StrictUndefined

    environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True)
    return encodable(environment.from_string(template).render(values))
