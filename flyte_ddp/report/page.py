"""The report's page as a Jinja template, in Python strings because Flyte ships only modules."""

STYLE = """
.ddp { --ground: #fff; --card: #f6f7f9; --ink: #1b1f24; --soft: #57606a; --line: #d8dee4; --shade: #9aa4ae;
  --accent: #0b57d0; --good: #1a7f37; --bad: #b42318; --warn: #fff4d6; --right: 11, 87, 208; --wrong: 180, 35, 24;
  --hot: #fff;
  --c1: #0b57d0; --c2: #c2410c; --c3: #15803d; --c4: #9333ea; --c5: #be123c;
  --c6: #0e7490; --c7: #854d0e; --c8: #4b5563;
  background: var(--ground); color: var(--ink); font: 16px/1.5 system-ui, -apple-system, "Segoe UI", Roboto,
  "DejaVu Sans", sans-serif; box-sizing: border-box; max-width: 76rem; margin: 0 auto; padding: 1rem; }
@media (prefers-color-scheme: dark) { .ddp { --ground: #0f1318; --card: #191f27; --ink: #e8edf2; --soft: #a5b0bb;
  --line: #37404b; --shade: #6b7683; --accent: #8ab4f8; --good: #5bd17b; --bad: #ff8a80; --warn: #3d3116;
  --right: 138, 180, 248; --wrong: 255, 138, 128; --hot: #0f1318; --c1: #8ab4f8; --c2: #ffa657; --c3: #5bd17b;
  --c4: #d2a8ff; --c5: #ff8fa3; --c6: #67d4e8; --c7: #e3c16f; --c8: #b6c0ca; } }
.ddp *, .ddp *::before { box-sizing: border-box; }
.ddp h1 { font-size: 1.5rem; line-height: 1.25; margin: 0; overflow-wrap: anywhere; }
.ddp h2 { font-size: 1.2rem; margin: 2.5rem 0 .75rem; padding-top: .75rem; border-top: 1px solid var(--line); }
.ddp h3, .ddp figcaption, .ddp caption { font-size: 1rem; font-weight: 600; margin: 0 0 .5rem; text-align: left; }
.ddp p { margin: .5rem 0; max-width: 70ch; overflow-wrap: anywhere; }
.ddp a { color: var(--accent); overflow-wrap: anywhere; }
.ddp .soft { color: var(--soft); }
.ddp .soft, .ddp small { font-size: .875rem; }
.ddp .top { display: flex; flex-wrap: wrap; gap: .25rem 1rem; align-items: baseline; justify-content: space-between; }
.ddp .status { border: 1px solid currentColor; border-radius: 1rem; padding: 0 .7rem; font-size: .875rem;
  font-weight: 600; color: var(--accent); white-space: nowrap; }
.ddp .status.Finished { color: var(--good); }
.ddp .status.Failed { color: var(--bad); }
.ddp .notice { background: var(--warn); border-radius: .5rem; padding: .6rem .9rem; margin: 1rem 0;
  overflow-wrap: anywhere; }
.ddp .notice.long { max-height: 20rem; overflow-y: auto; }
.ddp .tiles { display: grid; grid-template-columns: repeat(auto-fit, minmax(7.8rem, 1fr)); gap: .75rem;
  margin: 1rem 0; }
.ddp .tile { background: var(--card); border-radius: .6rem; padding: .75rem 1rem; }
.ddp .tile b { display: block; font-size: 1.35rem; line-height: 1.3; font-variant-numeric: tabular-nums; }
.ddp .tile.first b { font-size: 1.9rem; line-height: 1.2; color: var(--accent); }
.ddp .tile span { color: var(--soft); font-size: .875rem; }
.ddp .grid { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 21rem), 1fr)); gap: 1.25rem;
  align-items: start; }
.ddp figure, .ddp .card { background: var(--card); border-radius: .6rem; padding: 1rem; margin: 0; min-width: 0; }
.ddp .wide { grid-column: 1 / -1; }
.ddp .columns { columns: 21rem; column-gap: 1.25rem; }
.ddp .columns > * { break-inside: avoid; margin-bottom: 1.25rem; }
.ddp figure > svg { display: block; width: 100%; height: auto; }
.ddp svg text { font-family: inherit !important; }
.ddp .scroll { overflow-x: auto; background: /* the shadow at an edge behind which there is more */
  linear-gradient(90deg, var(--card) 1.5rem, transparent 3rem) local no-repeat,
  linear-gradient(270deg, var(--card) 1.5rem, transparent 3rem) local no-repeat,
  linear-gradient(90deg, var(--shade), transparent 1.25rem) no-repeat,
  linear-gradient(270deg, var(--shade), transparent 1.25rem) no-repeat; }
.ddp table { border-collapse: collapse; width: 100%; font-size: .9rem; font-variant-numeric: tabular-nums; }
.ddp th, .ddp td { text-align: left; font-weight: 400; padding: .3rem .6rem .3rem 0; vertical-align: top;
  border-bottom: 1px solid var(--line); }
.ddp td { overflow-wrap: anywhere; }
.ddp .wide > table th { width: 12rem; }
.ddp tr:last-child > * { border-bottom: 0; }
.ddp thead th { color: var(--soft); font-weight: 600; overflow-wrap: normal; vertical-align: bottom; }
.ddp .number { text-align: right; white-space: nowrap; }
.ddp .scroll thead .number { white-space: normal; padding-left: .6rem; }
.ddp .apart { margin-top: 1.25rem; }
.ddp .bar { display: block; height: .5rem; border-radius: .25rem; background: var(--line); min-width: 2rem;
  margin-top: .45rem; }
.ddp .bar i { display: block; height: 100%; border-radius: .25rem; background: var(--c1); }
.ddp .stack { display: grid; grid-template-columns: 9rem 1fr; gap: .75rem; align-items: center; font-size: .875rem;
  margin: .4rem 0; }
.ddp .stack div { display: flex; height: 1.1rem; border-radius: .25rem; overflow: hidden; }
.ddp .key { white-space: nowrap; margin-right: 1rem; }
.ddp .key i { display: inline-block; width: .8em; height: .8em; border-radius: .15em; margin-right: .35em; }
.ddp .of-steps { background: var(--c1); } .ddp .of-evaluating { background: var(--c3); }
.ddp .of-data { background: var(--c7); } .ddp .of-stragglers { background: var(--c2); }
.ddp .of-checkpoints { background: var(--c4); } .ddp .of-fetching { background: var(--c6); }
.ddp .of-starting { background: var(--c8); } .ddp .of-recovering { background: #8d96a3; }
.ddp .of-lost { background: var(--bad); } .ddp .of-between { background: var(--line); }
.ddp .of-finishing { background: #b9a3d6; }
.ddp .bars td:last-child { width: 35%; padding-right: 0; }
.ddp .bars th { min-width: 4.2rem; }
.ddp .confusion { table-layout: fixed; font-size: .8rem; }
.ddp .confusion.roomy { min-width: 25rem; }
.ddp .confusion tr > :first-child { width: 2em; }
.ddp .confusion.roomy tr > :first-child { width: 6.4em; }
.ddp .confusion th, .ddp .confusion td { text-align: center; padding: .35em 0; border: 1px solid var(--ground);
  overflow-wrap: normal; }
.ddp .confusion thead th { vertical-align: bottom; }
.ddp .confusion .long { writing-mode: vertical-rl; transform: rotate(180deg); display: inline-block;
  white-space: nowrap; }
.ddp .confusion tbody th { text-align: right; padding-right: .5em; color: var(--soft); font-weight: 600;
  white-space: nowrap; overflow: hidden; text-overflow: ellipsis; }
.ddp .confusion .hot { color: var(--hot); }
.ddp .confusion .none { color: var(--soft); }
.ddp .pictures { display: grid; grid-template-columns: repeat(auto-fill, minmax(5.4rem, 1fr)); gap: .75rem; padding: 0;
  margin: .75rem 0 0; list-style: none; }
.ddp .pictures.small { grid-template-columns: repeat(auto-fill, minmax(3.6rem, 1fr)); gap: .5rem; }
.ddp .pictures.drawn { grid-template-columns: repeat(auto-fill, minmax(min(100%, 14rem), 1fr)); }
.ddp .pictures.drawn img { aspect-ratio: auto; }
.ddp .pictures li { font-size: .8rem; line-height: 1.35; overflow-wrap: anywhere; }
.ddp .pictures img { display: block; width: 100%; aspect-ratio: 1; object-fit: contain; image-rendering: pixelated;
  border-radius: .4rem; background: #000; margin-bottom: .25rem; }
.ddp code { font: .85em ui-monospace, "DejaVu Sans Mono", monospace; overflow-wrap: anywhere; }
"""

MACROS = """
{% macro table(title, lines, wide=False) %}
<div class="card{% if wide %} wide{% endif %}"><table>{% if title %}<caption>{{ title }}</caption>{% endif %}<tbody>
{% for line in lines %}
<tr><th scope="row">{{ line[0] }}</th><td>
{% if line[2] is defined and line[2] %}<b>{{ line[1] }}</b> <small class="soft">(default {{ line[2] }})</small>
{% else %}{{ line[1] }}{% endif %}
</td></tr>
{% endfor %}
</tbody></table></div>
{% endmacro %}

{% macro bars(title, heads, lines) %}
<div class="card"><table class="bars"><caption>{{ title }}</caption><thead><tr>
{% for head in heads %}<th scope="col"{% if not loop.first %} class="number"{% endif %}>{{ head }}</th>{% endfor %}
<td></td></tr></thead><tbody>
{% for label, values, percent in lines %}
<tr><th scope="row">{{ label }}</th>{% for value in values %}<td class="number">{{ value }}</td>{% endfor %}
<td><span class="bar" aria-hidden="true"><i style="width: {{ percent }}%"></i></span></td></tr>
{% endfor %}
</tbody></table></div>
{% endmacro %}

{% macro stacks(title, lines, legend) %}
<figure><figcaption>{{ title }}</figcaption>
{% for label, parts in lines %}
<div class="stack"><span>{{ label }}</span><div aria-hidden="true">
{% for cause, percent in parts %}<i class="of-{{ cause }}" style="width: {{ percent }}%"></i>{% endfor %}
</div></div>
{% endfor %}
<p class="soft">
{% for cause, name in legend %}<span class="key"><i class="of-{{ cause }}"></i>{{ name }}</span>{% endfor %}
</p></figure>
{% endmacro %}

{% macro grid_table(title, heads, lines, code=False) %}
<div class="card wide"><div class="scroll" tabindex="0" role="region" aria-label="{{ title }}"><table>
<caption>{{ title }}</caption><thead><tr>
{% for head in heads %}<th scope="col"{% if not loop.first %} class="number"{% endif %}>{{ head }}</th>{% endfor %}
</tr></thead><tbody>
{% for line in lines %}
<tr><th scope="row">{% if code %}<code>{{ line[0] }}</code>{% else %}{{ line[0] }}{% endif %}</th>
{% for value in line[1:] %}<td class="number">{{ value }}</td>{% endfor %}</tr>
{% endfor %}
</tbody></table></div></div>
{% endmacro %}

{% macro gallery(pictures, size="", of="") %}
<ul class="pictures {{ size }}">
{% for picture, caption in pictures %}
<li><img src="{{ picture }}" alt="{{ of }}{{ caption }}">{{ caption }}</li>
{% endfor %}
</ul>
{% endmacro %}

{% macro figure(shown) %}<figure><figcaption>{{ shown.title }}</figcaption>{{ shown.svg | safe }}</figure>{% endmacro %}

{% macro confusion_table(names, cells, roomy) %}
<figure><figcaption id="confusion">Confusion matrix</figcaption>
<div class="scroll" tabindex="0" role="region" aria-labelledby="confusion">
<table class="confusion{% if roomy %} roomy{% endif %}" aria-labelledby="confusion"><thead><tr><td></td>
{% for name in names %}
<th scope="col"><span{% if roomy %} class="long"{% endif %}>{{ name }}</span></th>
{% endfor %}
</tr></thead><tbody>
{% for name in names %}
<tr><th scope="row">{{ name }}</th>
{% for count, heat, kind, look in cells[loop.index0] %}
<td class="{{ look }}" style="background: rgba(var(--{{ kind }}), {{ heat }})">{{ count }}</td>
{% endfor %}
</tr>
{% endfor %}
</tbody></table></div>
<p class="soft">Rows: the true class. Columns: the predicted class. Everything off the diagonal is wrong.</p></figure>
{% endmacro %}
"""

REPORT = """
<main class="ddp">
{% set info = record.info %}
<div class="top"><h1>Training {{ record.subject }}</h1>
<span class="status {{ record.status.split(",")[0] }}" role="status">{{ record.status }}</span></div>
<p class="soft">{{ info.settings.model | default(info.recipe_name) }}, run {{ info.name }}</p>
{% if record.failure %}<p class="notice"><b>Failed:</b> {{ record.failure }}</p>{% endif %}
{% for warning in record.problems %}<p class="notice"><b>Warning:</b> {{ warning.reason }}</p>{% endfor %}
{% if info.is_stand_in %}
<p class="notice"><b>Stand-in data.</b> The workflow's own data could not be downloaded, so this model was trained on
{{ info.description.name }}. Its accuracy says nothing about that on the workflow's own data.</p>
{% endif %}
<div class="tiles">
{% for value, label in tiles %}
<div class="tile{% if loop.first %} first{% endif %}"><b>{{ value }}</b><span>{{ label }}</span></div>
{% endfor %}
</div>
{% set url = record.tracking_url %}
{% if url %}<p>Tracked at <a href="{{ url }}" rel="noreferrer">{{ url }}</a></p>{% endif %}
{% if record.notes %}
<div class="notice long"><b>Notes</b>{% for note in record.notes %}<p>{{ note }}</p>{% endfor %}</div>
{% endif %}

{% if curves %}
<h2>Progress</h2><div class="grid">
{% for shown in curves %}{{ figure(shown) }}{% endfor %}
{% if epochs.lines %}{{ grid_table(epochs.title, epochs.heads, epochs.lines) }}{% endif %}
{% if kept %}{{ grid_table(kept.title, kept.heads, kept.lines, True) }}{% endif %}
</div>
{% endif %}

{% if classes %}
<h2>Right and wrong</h2><div class="grid">
{% if cells %}{{ confusion_table(names, cells, roomy) }}{% endif %}
{{ bars("Accuracy by class", ("Class", "Right", "Accuracy"), classes) }}
</div>
{% endif %}
{% if mistakes %}
<h3 class="apart">Most confident mistakes</h3><ul class="pictures">
{% for picture, index, truth, guess, sure in mistakes %}
<li><img src="{{ picture }}" alt="Test image {{ index }}: {{ truth }}, taken for {{ guess }}">
<b>{{ truth }}</b>, taken for <b>{{ guess }}</b><br><span class="soft">{{ sure }}</span></li>
{% endfor %}
</ul>
{% endif %}

{% if pictures %}
<h2>Pictures</h2>{{ gallery(pictures, "drawn") }}
{% endif %}

{% if figures %}
<h2>Figures</h2><div class="grid">{% for shown in figures %}{{ figure(shown) }}{% endfor %}</div>
{% endif %}

{% if data %}
<h2>Data</h2><div class="grid">{{ table("Dataset", data) }}
{% if samples %}
<div class="card"><h3>Training images</h3>{{ gallery(samples, "small", "Training image of class ") }}</div>
{% endif %}
</div>
{% endif %}

<h2>Speed</h2>
{% for warning in record.slow_ranks %}<p class="notice"><b>Warning:</b> {{ warning.reason }}</p>{% endfor %}
<div class="columns">{{ bars("Where the seconds have gone", ("Cause", "Seconds"), causes) }}
{% for shown in speed %}{{ figure(shown) }}{% endfor %}
</div>
{% if attempts %}<div class="apart">{{ stacks(attempts.title, attempts.bars, attempts.legend) }}</div>
<div class="apart">{{ grid_table("The same in numbers", attempts.heads, attempts.lines) }}</div>{% endif %}
{% for table in ranks %}<div class="apart">{{ grid_table(table.title, table.heads, table.lines) }}</div>{% endfor %}
{% if operators %}
<div class="apart">{{ grid_table(operators.title, operators.heads, operators.lines, True) }}</div>
{% endif %}

<h2>Set-up</h2><div class="columns">{% for title, lines in setup.items() %}{{ table(title, lines) }}{% endfor %}</div>
</main>
"""

PAGE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; style-src 'unsafe-inline'; img-src data:">
{% if live %}<meta http-equiv="refresh" content="5">{% endif %}
<link rel="icon" href="data:,">
<title>{{ title }}</title>
<style>html, body { margin: 0; background: #fff; }
@media (prefers-color-scheme: dark) { html, body { background: #0f1318; } }</style>
</head><body>{{ fragment | safe }}</body></html>
"""
