"""Range tests as text, with a plot, and as one HTML page."""

import math
from html import escape

from jtrain.inspect.rates.range_test import RangeResult
from jtrain.inspect.report.document import render_document
from jtrain.io.formatting import format_number
from jtrain.train.hooks.curve import curve
from jtrain.train.svg_chart import chart

STYLE = "svg { display: block; width: 100%; max-width: 46rem; height: auto; }\n"


def format_result(found: RangeResult, name: str, *, width: int = 80, ascii: bool = False) -> str:
    """Return the plot of the smoothed loss over the rate, and the suggestion."""
    points = [
        (math.log10(rate), loss) for rate, loss in zip(found.rates, found.smoothed, strict=True)
    ]
    plot = curve(
        {"smoothed loss over the learning rate": _visible(points)},
        width=width,
        height=16,
        ascii=ascii,
        label=_rate_label,
    )
    return "\n".join([plot, *suggest(found, name)])


def suggest(found: RangeResult, name: str) -> list[str]:
    """Return lines with the suggestion, its rule and its source."""
    steps = len(found.losses)
    end = "the loss diverged" if found.diverged else "the loss did not diverge"
    last = f"{found.rates[-1]:.2g}" if found.rates else "-"
    lines = [f"{steps} steps, the rate up to {last}: {end}"]
    if found.steepest is not None:
        lines += [
            f"suggestion: optimizer.lr={found.steepest:.1e}, at which the smoothed loss falls "
            f"fastest by the logarithm of the rate",
            f"bounds: from {found.lower:.1e} (the loss begins to fall) to {found.upper:.1e} (it is "
            f"lowest), as in Smith 2017, arXiv 1506.01186",
            f"try it: jtrain run {name} optimizer.lr={found.steepest:.1e}",
        ]
    return [*lines, *([f"note: {found.trouble}"] if found.trouble else [])]


def render_page(found: RangeResult, name: str) -> str:
    """Return the HTML page: the chart and the suggestion, without other files or network."""
    points = dict(
        _visible([(math.log10(r), x) for r, x in zip(found.rates, found.smoothed, strict=True)])
    )
    plain = dict(
        _visible([(math.log10(r), x) for r, x in zip(found.rates, found.losses, strict=True)])
    )
    drawn = chart(
        "loss",
        {"smoothed": points, "each step": plain},
        over="learning rate",
        label=_rate_label,
    )
    title = f"{name}: learning-rate range test"
    lines = "".join(f"<p>{escape(line)}</p>" for line in suggest(found, name))
    rows = "".join(
        f"<tr><td>{rate:.2e}</td><td>{format_number(loss)}</td><td>{format_number(mean)}</td></tr>"
        for rate, loss, mean in zip(found.rates, found.losses, found.smoothed, strict=True)
    )
    body = f"""{drawn}
{lines}
<details><summary>Numbers</summary>
<table><tr><th>rate</th><th>loss</th><th>smoothed</th></tr>{rows}</table></details>
"""
    return render_document(title, body, style=STYLE)


def _visible(points: list[tuple[float, float]]) -> list[tuple[float, float]]:
    """Return the points up to twice the first loss: a divergence would flatten all others."""
    finite = [y for _, y in points if math.isfinite(y)]
    if not finite:
        return []
    top = max(finite[0], min(finite)) + abs(finite[0] - min(finite)) + 0.1 * abs(finite[0])
    return [(x, min(y, top)) for x, y in points if math.isfinite(y)]


def _rate_label(log: float) -> str:
    return f"{10**log:.1e}"
