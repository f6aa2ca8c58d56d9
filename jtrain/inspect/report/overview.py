"""The overview table of a page: a line for each run."""

from collections.abc import Callable, Iterable, Sequence
from html import escape
from typing import Any

from jtrain.inspect.report.facts import summarize_run
from jtrain.inspect.report.read_run import RunStory, format_age
from jtrain.io.formatting import format_count, format_duration
from jtrain.io.formatting import format_number as format_number

COLOURS = 8  # colours in page.css


def render_table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a table that scrolls sideways if it is too wide; cells are HTML."""
    heads = "".join(f"<th>{cell}</th>" for cell in head)
    lines = "".join(f"<tr>{''.join(f'<td>{cell}</td>' for cell in row)}</tr>" for row in rows)
    scrolls = 'tabindex="0" role="region" aria-label="a table that scrolls sideways"'
    return f'<div class="wide" {scrolls}><table><tr>{heads}</tr>{lines}</table></div>'


def colour(run: int) -> str:
    """Return the CSS colour of a run by its index, the same as `colour` in charts.js."""
    return f"var(--c{run})" if run < COLOURS else f"hsl({run * 137.5 % 360:g} 60% 48%)"


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
    for i, (name, story, summary) in enumerate(zip(names, stories, summaries, strict=True)):
        numbers = [_or_dash(summary["validation"].get(metric), format_number) for metric in metrics]
        cells = [_button(i, name), _status(story), _step(story, summary["steps"])]
        cells += [_or_dash(summary["loss"], format_number), *numbers, _best(summary["best"], goals)]
        rows.append(cells + _speed(summary))
    return render_table([*head, "speed", "waiting", "trained"], rows)


def _button(run: int, name: str) -> str:
    return (
        f'<button class="run" data-run="{run}" aria-pressed="true">'
        f'<i class="swatch" style="background:{colour(run)}"></i>{escape(name)}</button>'
    )


def _status(story: RunStory) -> str:
    why = str(story.facts.get("why") or "")
    word = story.status if story.status.isalpha() else "unknown"
    open_end = word in {"running", "unknown"} and story.written is not None
    detail = f"last written {format_age(story.written)}" if open_end else why
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
