"""The report page: one HTML file without scripts or other files, with all run data escaped."""

import base64
import time
from collections.abc import Callable, Iterable, Sequence
from html import escape
from importlib.resources import files
from typing import Any

from jtrain.config.dump import ABSENT
from jtrain.config.schema import format_value
from jtrain.inspect.report.read_run import RunStory
from jtrain.inspect.report.series import (
    Charts,
    leaf_charts,
    metric_charts,
    newest_matrices,
    speed_charts,
    summarize_run,
)
from jtrain.io.formatting import format_count, format_duration, format_number
from jtrain.train.charts import svg_chart

ENVIRONMENT = (
    *("started", "jtrain", "python", "packages", "devices"),
    *("layout", "shards", "machine", "git", "argv"),
)
LOG_LINES = 200
NAMED = 8  # run names in a title


def render_page(
    stories: Sequence[RunStory], *, title: str = "", ranking: Sequence[str] = ()
) -> str:
    """Return the HTML page: curves, differences, speed, samples, pictures, environment, status.

    Args:
        title: the name of a sweep or folder; by default the names of the runs.
        ranking: lines of a ranking of the runs.
    """
    names = _names(stories)
    title = f"{title}: {len(names)} runs" if title else _joined(names)
    parts = [
        _troubles(stories, names),
        f'<section id="overview">{render_overview(stories, names)}</section>\n',
        _section(
            "Ranking",
            f'<pre class="table">{escape(chr(10).join(ranking))}</pre>' if ranking else "",
        ),
        _section("Curves", _charts(metric_charts(stories, names))),
        _section("What differs", _differences(stories, names)),
        _section("Pictures", _pictures(stories, names)),
        _section("Tables of numbers", _matrices(stories, names)),
        _section("Samples", _texts(stories, names, lambda story: story.samples)),
        _section("Speed", _charts(speed_charts(stories, names))),
        _section("Leaves", _charts(leaf_charts(stories, names))),
        _section("Environment", _environment(stories, names)),
        _section("Values", _values(stories, names)),
        _section("Logs", _texts(stories, names, _log_tail)),
    ]
    return render_document(title, "".join(parts), policy=f"{STYLES}; img-src data:")


def _charts(charts: Charts) -> str:
    """Return the charts side by side."""
    figures = "".join(svg_chart(title, lines) for title, lines in charts.items())
    return f'<div class="charts">{figures}</div>' if figures else ""


def _names(stories: Sequence[RunStory]) -> list[str]:
    """Return the name of each run; its directory if two runs share a name."""
    names = [story.name for story in stories]
    return [n if names.count(n) == 1 else str(s.path) for n, s in zip(names, stories, strict=True)]


def _joined(names: Sequence[str]) -> str:
    more = f" and {len(names) - NAMED} more" if len(names) > NAMED else ""
    return ", ".join(names[:NAMED]) + more


def _section(title: str, body: str) -> str:
    anchor = title.lower().replace(" ", "-")
    return f'<section id="{anchor}-section"><h2>{title}</h2>{body}</section>\n' if body else ""


def _troubles(stories: Sequence[RunStory], names: Sequence[str]) -> str:
    troubles = [(n, line) for n, s in zip(names, stories, strict=True) for line in s.troubles]
    lines = "".join(f"<li><b>{escape(n)}</b> {escape(line)}</li>" for n, line in troubles)
    return (
        f'<section class="troubles"><h2>Damaged</h2><ul>{lines}</ul></section>' if troubles else ""
    )


def _differences(stories: Sequence[RunStory], names: Sequence[str]) -> str:
    with_config = [(name, s) for name, s in zip(names, stories, strict=True) if s.config]
    if len(with_config) < 2:
        return ""
    stories = [story for _, story in with_config]
    keys = dict.fromkeys(key for story in stories for key in story.config)
    rows = []
    for key in keys:
        values = [_spell(story.config.get(key, ABSENT)) for story in stories]
        if len(set(values)) > 1:
            rows.append([f"<code>{escape(key)}</code>", *map(escape, values)])
    if not rows:
        return "<p>Nothing: these runs have the same values.</p>"
    return render_table(["value", *(escape(name) for name, _ in with_config)], rows)


def _values(stories: Sequence[RunStory], names: Sequence[str]) -> str:
    text = lambda s: "\n".join(f"{key}: {_spell(value)}" for key, value in s.config.items())
    return _texts(stories, names, text)


def _environment(stories: Sequence[RunStory], names: Sequence[str]) -> str:
    rows = []
    for fact in ENVIRONMENT:
        values = [_plain(story.facts.get(fact, "")) for story in stories]
        known = set(filter(None, values))
        same = fact in {"started", "argv"} or len(known) < 2  # both always differ
        mark = "" if same else ' <small class="differs">differs</small>'
        if any(values):
            rows.append([f"{escape(fact)}{mark}", *map(escape, values)])
    return render_table(["", *map(escape, names)], rows) if rows else ""


def _pictures(stories: Sequence[RunStory], names: Sequence[str]) -> str:
    figures = [
        f'<figure><img alt="{escape(picture.name)}" src="data:image/png;base64,'
        f'{base64.b64encode(picture.png).decode()}"><figcaption>{escape(name)}: '
        f"{escape(picture.name)}, step {picture.step:,}</figcaption></figure>"
        for name, story in zip(names, stories, strict=True)
        for picture in story.pictures
    ]
    return f'<div class="pictures">{"".join(figures)}</div>' if figures else ""


def _matrices(stories: Sequence[RunStory], names: Sequence[str]) -> str:
    figures = [
        f"<figure>{_heat(matrix['cells'])}<figcaption>{escape(name)}: {escape(matrix['name'])}, "
        f"step {matrix['step']:,}</figcaption></figure>"
        for name, story in zip(names, stories, strict=True)
        for matrix in newest_matrices(story)
    ]
    return f'<div class="pictures">{"".join(figures)}</div>' if figures else ""


def _heat(cells: Sequence[Sequence[float | int | None]]) -> str:
    """Return a heat map: each number's square is darker the larger its share of the row."""
    wide, high = len(cells[0]), len(cells)
    squares = []
    for y, row in enumerate(cells):
        # Normalize each row, so that rare classes are visible; a single row by its largest number.
        known = [abs(cell) for cell in row if cell is not None]
        total = (sum(known) if high > 1 else max(known, default=0.0)) or 1.0
        for x, cell in enumerate(row):
            share = 0.0 if cell is None else abs(cell) / total
            label = "not a number" if cell is None else f"{cell:.4g}, {share:.1%} of its row"
            squares.append(
                f'<rect x="{x}" y="{y}" width="1" height="1" fill-opacity="{share:.3f}">'
                f"<title>row {y}, column {x}: {label}</title></rect>"
            )
    return (
        f'<svg class="heat" viewBox="0 0 {wide} {high}" role="img" '
        f'style="aspect-ratio:{wide}/{high}">{"".join(squares)}</svg>'
    )


def _texts(stories: Sequence[RunStory], names: Sequence[str], text: Any) -> str:
    short = lambda words: words.count("\n") <= 40
    texts = [(name, text(story)) for name, story in zip(names, stories, strict=True)]
    opened = " open" if len(texts) == 1 and short(texts[0][1]) else ""
    return "".join(
        f"<details{opened}><summary>{escape(name)}</summary><pre>{escape(words)}</pre></details>"
        for name, words in texts
        if words.strip()
    )


def _log_tail(story: RunStory) -> str:
    return "\n".join(story.log.splitlines()[-LOG_LINES:])


def _spell(value: Any) -> str:
    return "absent" if value is ABSENT else format_value(value)


def _plain(value: Any) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{name} {version}" for name, version in value.items() if version)
    if isinstance(value, list):
        return " ".join(map(str, value))
    return str(value)


def render_table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a table that scrolls sideways if it is too wide; cells are HTML."""
    heads = "".join(f"<th>{cell}</th>" for cell in head)
    lines = "".join(f"<tr>{''.join(f'<td>{cell}</td>' for cell in row)}</tr>" for row in rows)
    scrolls = 'tabindex="0" role="region" aria-label="a table that scrolls sideways"'
    return f'<div class="wide" {scrolls}><table><tr>{heads}</tr>{lines}</table></div>'


METRICS = 8  # columns of evaluations


def render_overview(stories: Sequence[RunStory], names: Sequence[str]) -> str:
    """Return the table of all runs: status, step, losses, evaluations, speed."""
    summaries = [summarize_run(story) for story in stories]
    metrics = list(dict.fromkeys(name for summary in summaries for name in summary["validation"]))[
        :METRICS
    ]
    goals = {summary["best"]["name"] for summary in summaries if summary["best"]}
    best = f"best {escape(next(iter(goals)))}" if len(goals) == 1 else "best"
    head = ["run", "status", "step", "loss", *map(escape, metrics), best]
    rows = []
    for name, story, summary in zip(names, stories, summaries, strict=True):
        numbers = [_or_dash(summary["validation"].get(metric), format_number) for metric in metrics]
        cells = [escape(name), _status(story), _step(story, summary["steps"])]
        cells += [_or_dash(summary["loss"], format_number), *numbers, _best(summary["best"], goals)]
        rows.append(cells + _speed(summary))
    return render_table([*head, "speed", "waiting", "trained"], rows)


def _status(story: RunStory) -> str:
    word = story.status if story.status.isalpha() else "unknown"
    detail = str(story.facts.get("why") or "")
    if word in {"running", "unknown"} and story.written is not None:
        detail = f"last written {format_duration(max(0.0, time.time() - story.written))} ago"
    label = f'<span class="status {word}">{escape(story.status)}</span>'
    return f"{label} <small>{escape(detail)}</small>"


def _step(story: RunStory, steps: Any) -> str:
    return f"{story.step:,}" + (f" / {escape(str(steps))}" if steps else "")


def _best(best: dict[str, Any] | None, goals: set[str]) -> str:
    if best is None:
        return "-"
    name = f"{escape(best['name'])} " if len(goals) > 1 else ""
    return f"{name}{format_number(best['value'])} <small>at {best['step']:,}</small>"


def _speed(summary: dict[str, Any]) -> list[str]:
    unit = escape((summary["rate_of"] or "").partition("_")[0])
    rate = summary["rate"]
    return [
        "-" if rate is None else f"{format_count(rate)} {unit}/s",
        _or_dash(summary["waiting"], "{:.1%}".format),
        _or_dash(summary["trained_seconds"] or None, format_duration),
    ]


def _or_dash(value: Any, text: Callable[[Any], str]) -> str:
    return "-" if value is None else text(value)


STYLES = "default-src 'none'; style-src 'unsafe-inline'"
"""Policy of a page without scripts."""


def render_document(title: str, body: str, *, style: str = "", policy: str = STYLES) -> str:
    """Return a page with a title, in the style of all pages.

    Args:
        body: HTML that follows the heading, ending with a line break.
        style: CSS after that of all pages, ending with a line break.
        policy: the page's Content-Security-Policy.
    """
    style = (files("jtrain.inspect.report") / "page.css").read_text("utf-8") + style
    return f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<meta http-equiv="Content-Security-Policy" content="{policy}">
<title>{escape(title)}</title>
<style>
{style}</style>
</head>
<body>
<h1>{escape(title)}</h1>
{body}</body>
</html>
"""
