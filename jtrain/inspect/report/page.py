"""The report page: one HTML file without scripts or other files, with all run data escaped."""

import base64
import dataclasses
import math
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from html import escape
from importlib.resources import files
from statistics import median
from typing import Any, TypeAlias

from jtrain.checkpoint.retention import BestMetric, best_step
from jtrain.config.dump import ABSENT
from jtrain.config.schema import format_value
from jtrain.inspect.report.read_run import Row, RunStory, finite_number
from jtrain.io.formatting import format_count, format_duration, format_number
from jtrain.train.charts import svg_chart

RATES = ("tokens_per_second", "rows_per_second")
MOST = 1200  # points per line

Points: TypeAlias = dict[int, float]  # finite values by step
Charts: TypeAlias = dict[str, dict[str, Points]]  # lines by their names, by title


def summarize_run(story: RunStory) -> dict[str, Any]:
    """Return status, step, losses, evaluations, rows or tokens per second, seconds and troubles."""
    sets = story.facts.get("sets")
    first = sets[0] if isinstance(sets, list) and sets and isinstance(sets[0], str) else "valid"
    speed, metrics = _scalars(story.speed), _scalars(story.metrics)
    losses = [
        *metrics.get("loss", {}).values(),
        *_scalars(story.steps[-1:]).get("loss", {}).values(),
    ]
    middle = lambda name: median(speed[name].values()) if name in speed else None
    rate = next((name for name in RATES if name in speed), None)
    return {
        "run": str(story.path),
        "name": story.name,
        "status": story.status,
        "step": story.step,
        "steps": story.config.get("steps"),
        "loss": losses[-1] if losses else None,
        "validation": _newest_validation(metrics, first),
        "best": _best_evaluation(story, metrics, first),
        "rate": rate and middle(rate),
        "rate_of": rate,
        "waiting": middle("waiting"),
        "trained_seconds": max(speed.get("trained", {}).values(), default=0),
        "troubles": list(story.troubles),
    }


def _newest_validation(metrics: Mapping[str, Points], first: str) -> dict[str, float]:
    """Return the newest value of each evaluation metric by name, `valid/accuracy`.

    Metrics of the `first` set come first, starting with its loss. Row counts are omitted.
    """
    names = [name for name in metrics if "/" in name and not name.endswith("/rows")]
    order = lambda name: (not name.startswith(f"{first}/"), not name.endswith("/loss"))
    return {name: list(metrics[name].values())[-1] for name in sorted(names, key=order)}


def _best_evaluation(
    story: RunStory, metrics: Mapping[str, Points], first: str
) -> dict[str, Any] | None:
    """Return the best evaluation by the run's checkpoint.best; by the loss if that is empty."""
    setting = story.config.get("checkpoint.best")
    goal = BestMetric.parse(setting if isinstance(setting, str) and setting else "loss")
    if goal is None:
        return None
    name = goal.name if "/" in goal.name else f"{first}/{goal.name}"
    values = metrics.get(name, {})
    step = best_step(values, goal)
    return None if step is None else {"name": name, "value": values[step], "step": step}


def metric_charts(stories: Sequence[RunStory]) -> Charts:
    """Return the charts of metrics: `loss` with `valid/loss` first.

    A chart of one run has all sets of a metric. Several runs share a chart for each set.
    """
    found: Charts = {}
    for story in stories:
        for key, points in _curves(story).items():
            one = len(stories) == 1
            title, line = (key.rpartition("/")[2], key) if one else (key, story.name)
            found.setdefault(title, {})[line] = thin(points)
    for name in [name for name in found if name.rpartition("/")[2] == "rows"]:
        del found[name]  # the number of evaluated rows, the same at every step
    if not any(any(points.values()) for points in found.get("skipped", {}).values()):
        found.pop("skipped", None)
    evaluated = lambda title: "/" in title or any("/" in line for line in found[title])
    loss = lambda title: title.rpartition("/")[2] == "loss"
    order = sorted(found, key=lambda title: (not loss(title), not evaluated(title), title))
    return {title: found[title] for title in order if any(found[title].values())}


def speed_charts(stories: Sequence[RunStory]) -> Charts:
    """Return the charts of throughput and of the share of time spent waiting for data."""
    rate = next((r for r in RATES if any(r in row for s in stories for row in s.speed)), RATES[-1])
    titles = {rate: rate.replace("_", " "), "waiting": "share of time waiting for data"}
    found: Charts = {}
    for story in stories:
        for key, points in _scalars(story.speed).items():
            if key in titles:
                found.setdefault(titles[key], {})[story.name] = thin(points)
    return found


def _curves(story: RunStory) -> dict[str, Points]:
    """Return the points of each metric, from steps.jsonl if that has more steps."""
    found = _scalars(story.metrics)
    for key, points in _scalars(story.steps).items():
        if len(points) > len(found.get(key, {})):
            found[key] = points
    return found


def thin(points: Points, most: int = MOST) -> Points:
    """Thin points to about `most`: keep the lowest and highest of each interval, so peaks stay."""
    if len(points) <= most:
        return points
    steps, size = list(points), math.ceil(2 * len(points) / most)
    parts = [steps[start : start + size] for start in range(0, len(steps), size)]
    value = lambda step: points[step]
    kept = [step for part in parts for step in sorted({min(part, key=value), max(part, key=value)})]
    return {step: points[step] for step in kept}


def _scalars(rows: Iterable[Row]) -> dict[str, Points]:
    """Return the finite numbers of some rows, by name and step."""
    found: dict[str, Points] = {}
    for row in rows:
        for key, value in row.items():
            if key != "step" and (number := finite_number(value)) is not None:
                found.setdefault(key, {})[row["step"]] = number
    return found


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
    stories = _with_unique_names(stories)
    title = f"{title}: {len(stories)} runs" if title else _joined([x.name for x in stories])
    ranked = escape("\n".join(ranking))
    parts = [
        _troubles(stories),
        f'<section id="overview">{render_overview(stories)}</section>\n',
        _section("Ranking", f'<pre class="table">{ranked}</pre>' if ranked else ""),
        _section("Curves", _charts(metric_charts(stories))),
        _section("What differs", _differences(stories)),
        _section("Pictures", _pictures(stories)),
        _section("Samples", _texts(stories, lambda story: story.samples)),
        _section("Speed", _charts(speed_charts(stories))),
        _section("Environment", _environment(stories)),
        _section("Values", _values(stories)),
        _section("Logs", _texts(stories, lambda x: "\n".join(x.log.splitlines()[-LOG_LINES:]))),
    ]
    return _render_document(title, "".join(parts))


def _charts(charts: Charts) -> str:
    """Return the charts side by side."""
    figures = "".join(svg_chart(title, lines) for title, lines in charts.items())
    return f'<div class="charts">{figures}</div>' if figures else ""


def _with_unique_names(stories: Sequence[RunStory]) -> list[RunStory]:
    """Return the runs; those that share a name are named by their directories."""
    names = [story.name for story in stories]
    unique = lambda story: story.name if names.count(story.name) == 1 else str(story.path)
    return [dataclasses.replace(story, name=unique(story)) for story in stories]


def _joined(names: Sequence[str]) -> str:
    more = f" and {len(names) - NAMED} more" if len(names) > NAMED else ""
    return ", ".join(names[:NAMED]) + more


def _section(title: str, body: str) -> str:
    anchor = title.lower().replace(" ", "-")
    return f'<section id="{anchor}-section"><h2>{title}</h2>{body}</section>\n' if body else ""


def _troubles(stories: Sequence[RunStory]) -> str:
    lines = "".join(
        f"<li><b>{escape(story.name)}</b> {escape(line)}</li>"
        for story in stories
        for line in story.troubles
    )
    return f'<section class="troubles"><h2>Damaged</h2><ul>{lines}</ul></section>' if lines else ""


def _differences(stories: Sequence[RunStory]) -> str:
    stories = [story for story in stories if story.config]
    if len(stories) < 2:
        return ""
    keys = dict.fromkeys(key for story in stories for key in story.config)
    rows = []
    for key in keys:
        values = [_spell(story.config.get(key, ABSENT)) for story in stories]
        if len(set(values)) > 1:
            rows.append([f"<code>{escape(key)}</code>", *map(escape, values)])
    if not rows:
        return "<p>Nothing: these runs have the same values.</p>"
    return render_table(["value", *(escape(story.name) for story in stories)], rows)


def _values(stories: Sequence[RunStory]) -> str:
    text = lambda s: "\n".join(f"{key}: {_spell(value)}" for key, value in s.config.items())
    return _texts(stories, text)


def _environment(stories: Sequence[RunStory]) -> str:
    rows = []
    for fact in ENVIRONMENT:
        values = [_plain(story.facts.get(fact, "")) for story in stories]
        known = set(filter(None, values))
        same = fact in {"started", "argv"} or len(known) < 2  # both always differ
        mark = "" if same else ' <small class="differs">differs</small>'
        if any(values):
            rows.append([f"{escape(fact)}{mark}", *map(escape, values)])
    return render_table(["", *(escape(story.name) for story in stories)], rows) if rows else ""


def _pictures(stories: Sequence[RunStory]) -> str:
    """Return the pictures side by side: the run, the name and the step of each below it."""
    figures = [
        f'<figure><img alt="{escape(each.name)}" src="data:image/png;base64,'
        f'{base64.b64encode(each.png).decode()}">'
        f"<figcaption>{escape(f'{story.name}: {each.name}')}, step {each.step:,}</figcaption>"
        f"</figure>"
        for story in stories
        for each in story.pictures
    ]
    return f'<div class="pictures">{"".join(figures)}</div>' if figures else ""


def _texts(stories: Sequence[RunStory], text: Callable[[RunStory], str]) -> str:
    short = lambda words: words.count("\n") <= 40
    texts = [(story.name, text(story)) for story in stories]
    opened = " open" if len(texts) == 1 and short(texts[0][1]) else ""
    return "".join(
        f"<details{opened}><summary>{escape(name)}</summary><pre>{escape(words)}</pre></details>"
        for name, words in texts
        if words.strip()
    )


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


def render_overview(stories: Sequence[RunStory]) -> str:
    """Return the table of all runs: status, step, losses, evaluations, speed."""
    summaries = [summarize_run(story) for story in stories]
    names = dict.fromkeys(name for summary in summaries for name in summary["validation"])
    metrics = list(names)[:METRICS]
    goals = {summary["best"]["name"] for summary in summaries if summary["best"]}
    best = f"best {escape(next(iter(goals)))}" if len(goals) == 1 else "best"
    head = ["run", "status", "step", "loss", *map(escape, metrics), best]
    rows = []
    for story, summary in zip(stories, summaries, strict=True):
        numbers = [_or_dash(summary["validation"].get(metric), format_number) for metric in metrics]
        cells = [escape(story.name), _status(story), _step(story, summary["steps"])]
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


def _render_document(title: str, body: str) -> str:
    """Return a page with a title; its policy allows no scripts and no other files."""
    style = (files("jtrain.inspect.report") / "page.css").read_text("utf-8")
    policy = "default-src 'none'; style-src 'unsafe-inline'; img-src data:"
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
