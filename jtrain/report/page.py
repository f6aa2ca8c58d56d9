"""One page about some runs: no file beside it, no network, nothing of a run that is not escaped."""

import base64
import json
from collections.abc import Iterable, Sequence
from html import escape
from importlib.resources import files
from statistics import median
from typing import Any

from jtrain.config.dump import ABSENT
from jtrain.config.words import spell
from jtrain.hooks.readable import count, duration
from jtrain.hooks.readable import number as spelt
from jtrain.report.reading import Story, age, finite
from jtrain.report.series import RATES, charts, clocks, leaf_charts, matrices, speeds

ENVIRONMENT = ("started", "jtrain", "python", "packages", "devices", "machine", "git", "argv")
LOG_LINES = 200


def page(stories: Sequence[Story]) -> str:
    """The page as HTML: curves, differences, speed, samples, pictures, environment and status."""
    names = _names(stories)
    title = ", ".join(names)
    data = {
        "runs": names,
        "clocks": clocks(stories),
        "charts": charts(stories),
        "speeds": speeds(stories),
        "leaves": leaf_charts(stories),
    }
    parts = [
        _troubles(stories, names),
        _overview(stories, names),
        _section("Curves", '<div id="charts" class="grid"></div>' if data["charts"] else ""),
        _section("What differs", _differences(stories, names)),
        _section("Pictures", _pictures(stories, names)),
        _section("Tables of numbers", _matrices(stories, names)),
        _section("Samples", _texts(stories, names, lambda story: story.samples)),
        _section("Speed", '<div id="speeds" class="grid"></div>' if data["speeds"] else ""),
        _section("Leaves", '<div id="leaves"></div>' if data["leaves"] else ""),
        _section("Environment", _environment(stories, names)),
        _section("Values", _values(stories, names)),
        _section("Logs", _texts(stories, names, _end_of_log)),
    ]
    here = files("jtrain.report")
    style, script = ((here / f).read_text("utf-8") for f in ("page.css", "charts.js"))
    return f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<meta http-equiv="Content-Security-Policy"
 content="default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; img-src data:">
<title>{escape(title)}</title>
<style>
{style}</style>
</head>
<body>
<h1>{escape(title)}</h1>
<noscript><p>The curves are drawn by a script in this page; it is switched off here.</p></noscript>
{"".join(parts)}
<script type="application/json" id="data">{in_script(data)}</script>
<script>
{script}</script>
</body>
</html>
"""


def in_script(data: Any) -> str:
    """JSON that no text in it can end, inside a script element."""
    text = json.dumps(data, allow_nan=False, separators=(",", ":"))
    for sign in "<>&\u2028\u2029":
        text = text.replace(sign, f"\\u{ord(sign):04x}")
    return text


def facts(story: Story) -> dict[str, Any]:
    """A run in a line, as plain numbers: status, step, losses, seconds, rows or tokens a second."""
    sets = story.facts.get("sets")
    judged = f"{sets[0] if isinstance(sets, list) and sets else 'valid'}/loss"
    valid = [(row[judged], row["step"]) for row in story.metrics if _has(row, judged)]
    losses = [row["loss"] for row in story.metrics if _has(row, "loss")]
    paces = [row for row in story.speed if _has(row, "waiting")]
    rate = next((r for r in RATES if any(_has(row, r) for row in story.speed)), None)
    best = min(valid, default=(None, None))
    return {
        "run": str(story.path),
        "name": story.name,
        "status": story.status,
        "step": story.step,
        "steps": story.config.get("steps"),
        "loss": losses[-1] if losses else None,
        "valid_loss": valid[-1][0] if valid else None,
        "best_valid_loss": best[0],
        "best_step": best[1],
        "rate": median(row[rate] for row in story.speed if _has(row, rate)) if rate else None,
        "rate_of": rate,
        "waiting": median(row["waiting"] for row in paces) if paces else None,
        "trained_seconds": max(
            (r["trained"] for r in story.speed if _has(r, "trained")), default=0
        ),
        "troubles": list(story.troubles),
    }


def _has(row: Any, key: str) -> bool:
    return isinstance(row.get(key), int | float) and finite(row[key])


def _names(stories: Sequence[Story]) -> list[str]:
    """What each run is called: its name, and its directory where two have the same."""
    names = [story.name for story in stories]
    return [n if names.count(n) == 1 else str(s.path) for n, s in zip(names, stories, strict=True)]


def _section(title: str, body: str) -> str:
    anchor = title.lower().replace(" ", "-")
    return f'<section id="{anchor}-section"><h2>{title}</h2>{body}</section>\n' if body else ""


def _troubles(stories: Sequence[Story], names: Sequence[str]) -> str:
    told = [(n, line) for n, s in zip(names, stories, strict=True) for line in s.troubles]
    lines = "".join(f"<li><b>{escape(n)}</b> {escape(line)}</li>" for n, line in told)
    return f'<section class="troubles"><h2>Damaged</h2><ul>{lines}</ul></section>' if told else ""


def _overview(stories: Sequence[Story], names: Sequence[str]) -> str:
    head = ["run", "status", "step", "loss", "valid", "best valid", "speed", "waiting", "trained"]
    rows = []
    for i, (name, story) in enumerate(zip(names, stories, strict=True)):
        known, why = facts(story), str(story.facts.get("why") or "")
        best, rate = known["best_valid_loss"], known["rate"]
        unit = escape((known["rate_of"] or "").partition("_")[0])
        status = story.status if story.status.isalpha() else "unknown"
        open_end = status in {"running", "unknown"} and story.written is not None
        seen = f"last written {age(story.written)}" if open_end else why
        rows.append(
            [
                f'<button class="run" data-run="{i}" aria-pressed="true">'
                f'<i class="swatch c{i % 8}"></i>{escape(name)}</button>',
                f'<span class="status {status}">'
                f"{escape(story.status)}</span> <small>{escape(seen)}</small>",
                f"{story.step:,}" + (f" / {escape(str(known['steps']))}" if known["steps"] else ""),
                _or_dash(known["loss"], spelt),
                _or_dash(known["valid_loss"], spelt),
                "-" if best is None else f"{spelt(best)} <small>at {known['best_step']:,}</small>",
                "-" if rate is None else f"{count(rate)} {unit}/s",
                _or_dash(known["waiting"], "{:.1%}".format),
                _or_dash(known["trained_seconds"] or None, duration),
            ]
        )
    return f'<section id="overview">{_table(head, rows)}</section>\n'


def _differences(stories: Sequence[Story], names: Sequence[str]) -> str:
    told = [(name, s) for name, s in zip(names, stories, strict=True) if s.config]
    if len(told) < 2:
        return ""
    stories = [story for _, story in told]
    keys = dict.fromkeys(key for story in stories for key in story.config)
    rows = []
    for key in keys:
        values = [_spell(story.config.get(key, ABSENT)) for story in stories]
        if len(set(values)) > 1:
            rows.append([f"<code>{escape(key)}</code>", *map(escape, values)])
    if not rows:
        return "<p>Nothing: these runs have the same values.</p>"
    return _table(["value", *(escape(name) for name, _ in told)], rows)


def _values(stories: Sequence[Story], names: Sequence[str]) -> str:
    text = lambda s: "\n".join(f"{key}: {_spell(value)}" for key, value in s.config.items())
    return _texts(stories, names, text)


def _environment(stories: Sequence[Story], names: Sequence[str]) -> str:
    rows = []
    for fact in ENVIRONMENT:
        values = [_plain(story.facts.get(fact, "")) for story in stories]
        known = set(filter(None, values))
        one = fact in {"started", "argv"} or len(known) < 2  # those two are each run's own
        mark = "" if one else ' <small class="differs">differs</small>'
        if any(values):
            rows.append([f"{escape(fact)}{mark}", *map(escape, values)])
    return _table(["", *map(escape, names)], rows) if rows else ""


def _pictures(stories: Sequence[Story], names: Sequence[str]) -> str:
    figures = [
        f'<figure><img alt="{escape(picture.name)}" src="data:image/png;base64,'
        f'{base64.b64encode(picture.png).decode()}"><figcaption>{escape(name)}: '
        f"{escape(picture.name)}, step {picture.step:,}</figcaption></figure>"
        for name, story in zip(names, stories, strict=True)
        for picture in story.pictures
    ]
    return f'<div class="pictures">{"".join(figures)}</div>' if figures else ""


def _matrices(stories: Sequence[Story], names: Sequence[str]) -> str:
    figures = [
        f"<figure>{_heat(matrix['cells'])}<figcaption>{escape(name)}: {escape(matrix['name'])}, "
        f"step {matrix['step']:,}</figcaption></figure>"
        for name, story in zip(names, stories, strict=True)
        for matrix in matrices(story)
    ]
    return f'<div class="pictures">{"".join(figures)}</div>' if figures else ""


def _heat(cells: Sequence[Sequence[float | int | None]]) -> str:
    """A square a number, the darker the larger its share of its row."""
    wide, high = len(cells[0]), len(cells)
    squares = []
    for y, row in enumerate(cells):
        # By rows, so that a rare class is seen as well as a frequent one; one row by its largest.
        known = [abs(cell) for cell in row if cell is not None]
        whole = (sum(known) if high > 1 else max(known, default=0.0)) or 1.0
        for x, cell in enumerate(row):
            share = 0.0 if cell is None else abs(cell) / whole
            told = "not a number" if cell is None else f"{cell:.4g}, {share:.1%} of its row"
            squares.append(
                f'<rect x="{x}" y="{y}" width="1" height="1" fill-opacity="{share:.3f}">'
                f"<title>row {y}, column {x}: {told}</title></rect>"
            )
    return (
        f'<svg class="heat" viewBox="0 0 {wide} {high}" role="img" '
        f'style="aspect-ratio:{wide}/{high}">{"".join(squares)}</svg>'
    )


def _texts(stories: Sequence[Story], names: Sequence[str], text: Any) -> str:
    short = lambda words: words.count("\n") <= 40
    told = [(name, text(story)) for name, story in zip(names, stories, strict=True)]
    opened = " open" if len(told) == 1 and short(told[0][1]) else ""
    return "".join(
        f"<details{opened}><summary>{escape(name)}</summary><pre>{escape(words)}</pre></details>"
        for name, words in told
        if words.strip()
    )


def _end_of_log(story: Story) -> str:
    return "\n".join(story.log.splitlines()[-LOG_LINES:])


def _table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table of cells that are HTML already."""
    heads = "".join(f"<th>{cell}</th>" for cell in head)
    lines = "".join(f"<tr>{''.join(f'<td>{cell}</td>' for cell in row)}</tr>" for row in rows)
    return f'<div class="wide"><table><tr>{heads}</tr>{lines}</table></div>'


def _or_dash(value: Any, text: Any) -> str:
    return "-" if value is None else text(value)


def _spell(value: Any) -> str:
    return "absent" if value is ABSENT else spell(value)


def _plain(value: Any) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{name} {version}" for name, version in value.items() if version)
    if isinstance(value, list):
        return " ".join(map(str, value))
    return str(value)
