"""HTML helpers: tables, and the colour of a run."""

from collections.abc import Iterable, Sequence

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
