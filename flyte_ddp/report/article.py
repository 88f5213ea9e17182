"""Pages of headings, text, tables, curves and pictures in the style of the training report; each is one file."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from flyte_ddp.report import page
from flyte_ddp.report.report import render

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
{% elif section.lines %}
<div class="card wide"><table>{% if section.caption %}<caption>{{ section.caption }}</caption>{% endif %}<tbody>
{% for label, text in section.lines %}
<tr><th scope="row" style="width: 12rem">{{ label }}</th><td>{{ text }}</td></tr>
{% endfor %}
</tbody></table></div>
{% endif %}
{% if section.output %}
<div class="card wide"><div class="scroll" tabindex="0" role="region" aria-label="{{ section.title }}"><pre>
{{ section.output }}</pre></div></div>
{% endif %}
</div>
{% if section.pictures %}
<ul class="pictures">
{% for source, label in section.pictures %}
<li><img src="{{ source }}" alt="{{ label }}">{{ label }}</li>
{% endfor %}
</ul>
{% endif %}
{% endfor %}
</main>
"""


@dataclass(frozen=True)
class Drawing:
    """A figure: an SVG element, as returned by figures.draw and figures.inline."""

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


def article(title: str, subtitle: str, sections: Sequence[Section]) -> str:
    """The content of <body>, for a Deck; everything except the figures is escaped."""
    from markupsafe import Markup

    shown: list[Any] = [
        {**vars(section), "figures": [{"title": one.title, "svg": Markup(one.svg)} for one in section.figures]}
        for section in sections
    ]
    template = f"<style>{page.STYLE}</style>{page.MACROS}{BODY}"
    return render(template, title=title, subtitle=subtitle, sections=shown)


def document(title: str, fragment: str) -> str:
    """The whole page around a fragment; it loads nothing from the network."""
    from markupsafe import Markup

    return render(page.PAGE, title=title, fragment=Markup(fragment), live=False)
