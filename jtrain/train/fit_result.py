"""Result of jt.fit: parameters, metrics and curves, with evaluation and prediction."""

import dataclasses
import html
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from jtrain.core.pytree import named_leaves, num_elements
from jtrain.core.state import TrainState
from jtrain.core.types import Couples, Extra, Params
from jtrain.errors import ConfigError, LossError
from jtrain.errors.spelling import nearest_choice
from jtrain.io.formatting import format_number
from jtrain.models.model_loss import ModelLoss
from jtrain.train import fit_arguments, fit_data
from jtrain.train.charts import svg_chart, text_chart
from jtrain.train.hooks.evaluation import EvaluationResult
from jtrain.train.predict import evaluate, predict

INNER = {"grad_norm", "update_norm", "skipped", "loss_scale"}  # metrics that are not shown


@dataclasses.dataclass(frozen=True, repr=False)
class Fitted:
    """Result of a training run."""

    params: Params
    """Parameters to use: of the last step, or of the best evaluation if `best` was given; with an
    optimizer that keeps an average, the average."""
    extra: Extra
    """State of the model beside the parameters."""
    state: TrainState
    """Full state after the last step."""
    history: Mapping[str, Mapping[int, Any]]
    """Numbers by name and step: `history["loss"][100]`, `history["valid/loss"]`. The last step is
    always included."""
    step: int
    """Last step that was taken."""
    best: EvaluationResult | None
    """Step and numbers of the best evaluation; None unless `best` was given."""
    why: str
    """Why the run ended, if before the last step."""
    directory: Path | None
    """Directory of the run, if it has one."""
    loss: Any = None
    """Loss that was minimised."""
    start: fit_arguments.FitStart | None = None
    """Loss and initial parameters."""

    @property
    def model(self) -> Any:
        """Trained nnx module, with the parameters to use, in evaluation mode.

        Raises:
            ConfigError: if the parameters were given as arrays.
        """
        module = None if self.start is None else self.start.module
        if module is None:
            raise ConfigError(
                "there is no model: fit was given arrays as parameters. Use result.params, or give "
                "fit the nnx module itself: jt.fit(loss, module, data)."
            )
        return module.module(self.params, self.extra, None, False)

    def evaluate(
        self, data: fit_data.Data, *, batch: int = 0, couples: Couples | None = None
    ) -> dict[str, float]:
        """Return the loss and the metrics over all of `data`; see `jt.evaluate`.

        Args:
            data: as for `jt.fit`.
            batch: rows at a time.
            couples: as for `jt.evaluate`; by default as given to `jt.fit`. The layers of a model
                (batch norm) couple rows in training only.

        Raises:
            LossError: if coupled rows would be split.
        """
        assert self.start is not None, "jt.fit sets `start`"
        if couples is None:
            layers = isinstance(self.loss, ModelLoss) or not self.start.declared
            couples = "nothing" if layers else self.start.couples
        return evaluate(
            self.start.loss, self.params, data, batch=batch, extra=self.extra, couples=couples
        )

    def predict(self, data: fit_data.Data, *, batch: int = 0) -> Any:
        """Return the model's output for each row of `data`; see `jt.predict`.

        Raises:
            LossError: if the loss was not built from a model (`jt.classifier` and the like).
        """
        if not isinstance(self.loss, ModelLoss):
            raise LossError(
                "the loss is a plain function, from which the model's output is not known. Write "
                "jt.predict(apply, result.params, data) with apply(params, batch), or build the "
                "loss from a model: jt.classifier(model), jt.regression(model)."
            )
        return predict(self.loss, self.params, data, batch=batch, extra=self.extra)

    def plot(self, *names: str, ax: Any = None) -> "MetricCurves":
        """Return the curves of some metrics, by default of the loss and the evaluated metrics.

        A notebook shows them as a picture, a terminal as text; `.save("curves.svg")` writes them.

        Args:
            names: of metrics, "loss" or "accuracy"; each is drawn for all its sets.
            ax: axes of matplotlib to draw the first metric on as well.

        Raises:
            ConfigError: for an unknown metric.
        """
        scalar = [name for name, points in self.history.items() if not _shape(points)]
        metrics = list(dict.fromkeys(name.rpartition("/")[2] for name in scalar))
        evaluated = [name.rpartition("/")[2] for name in scalar if "/" in name]
        default = ("loss", *dict.fromkeys(n for n in evaluated if n not in ("loss", "rows")))
        chosen = names or default
        for name in chosen:
            if name not in metrics:
                raise ConfigError(
                    f"{name!r} is no metric of the history, which has {', '.join(metrics)}; an "
                    f"array has no curve, but its values: result.history[NAME]. Write "
                    f'result.plot("{nearest_choice(name, metrics) or "loss"}").'
                )
        curves = MetricCurves(
            {
                name: {
                    full.rpartition("/")[0] or "train": points
                    for full, points in self.history.items()
                    if full.rpartition("/")[2] == name
                }
                for name in chosen
            }
        )
        if ax is not None:
            curves.draw(ax)
        return curves

    def __repr__(self) -> str:
        """Return at most ten lines: what was trained, the results, and what to type next."""
        leaves = named_leaves(self.params)
        shapes = [f"{name or 'array'} {list(np.shape(leaf))}" for name, leaf in leaves.items()]
        more = f", and {len(shapes) - 3} more" if len(shapes) > 3 else ""
        rows = [f"  {name:18} {words}" for name, words in self._results(4)]
        lines = [
            f"Fitted: {self.step} steps, {num_elements(self.params):,} parameters "
            f"({', '.join(shapes[:3])}{more})",
            *rows,
        ]
        if self.best:
            scalars = {name: x for name, x in self.best.numbers.items() if not np.ndim(x)}
            numbers = [f"{name} {format_number(x)}" for name, x in scalars.items()]
            lines.append(f"  best: {', '.join(numbers)} at step {self.best.step}")
        if self.why:
            lines.append(f"  ended: {self.why}")
        if self.directory:
            lines.append(f"  in {self.directory}")
        return "\n".join([*lines, f"next: {', '.join(self._next())}"])

    def _repr_html_(self) -> str:
        """Return a table and the curves, for a notebook."""
        rows = "".join(
            f'<tr><th style="text-align:left">{html.escape(name)}</th>'
            f'<td style="text-align:left">{html.escape(words)}</td></tr>'
            for name, words in self._results(8)
        )
        why = f"<p>ended: {html.escape(self.why)}</p>" if self.why else ""
        where = f"<p>in <code>{html.escape(str(self.directory))}</code></p>"
        after = " · ".join(f"<code>{html.escape(words)}</code>" for words in self._next())
        return (
            f"<div><b>{self.step} steps, {num_elements(self.params):,} parameters</b>"
            f"<table>{rows}</table>{why}{where if self.directory else ''}"
            f"{self.plot()._repr_html_()}<p>next: {after}</p></div>"
        )

    def _results(self, most: int) -> Sequence[tuple[str, str]]:
        """Return at most `most` metrics with their course, validation metrics first."""
        shown = [name for name in self.history if name.rpartition("/")[2] not in {*INNER, "rows"}]
        shown.sort(key=lambda name: ("/" not in name, not name.endswith("loss")))
        return [(name, _course(self.history[name])) for name in shown[:most]]

    def _next(self) -> list[str]:
        calls = ["result.plot()", "result.evaluate(data)"]
        if isinstance(self.loss, ModelLoss):
            calls.append("result.predict(x)")
        if self.start is not None and self.start.module is not None:
            calls.append("result.model")
        return [*calls, "result.params", 'result.history["loss"]']


@dataclasses.dataclass(frozen=True, repr=False)
class MetricCurves:
    """Curves over the steps: for each metric a line for training and for each set."""

    metrics: Mapping[str, Mapping[str, Mapping[int, float]]]

    def svg(self) -> str:
        """Return the charts as SVG, side by side."""
        return "".join(svg_chart(name, lines) for name, lines in self.metrics.items())

    def save(self, path: Path | str) -> Path:
        """Write the charts to a file that a browser shows, .html or .svg (of one metric).

        Raises:
            ConfigError: for another suffix, or several metrics in one .svg.
        """
        path = Path(path)
        if path.suffix == ".svg" and len(self.metrics) > 1:
            raise ConfigError(
                f"a .svg holds one chart, and there are {', '.join(self.metrics)}. Write "
                f'result.plot("{next(iter(self.metrics))}").save("{path}"), or name it .html.'
            )
        if path.suffix not in (".svg", ".html"):
            raise ConfigError(f"{path}: charts are written as .html or .svg. Name it curves.html.")
        path.write_text(self.svg(), encoding="utf-8")
        return path

    def draw(self, ax: Any) -> Any:
        """Draw the first metric on axes of matplotlib, and return the axes."""
        name, lines = next(iter(self.metrics.items()))
        for label, points in lines.items():
            ax.plot(list(points), list(points.values()), label=label)
        ax.set_xlabel("step")
        ax.set_ylabel(name)
        ax.legend()
        return ax

    def __repr__(self) -> str:
        """Return the curves as text."""
        drawn = (f"{n}\n{text_chart(lines, height=14)}" for n, lines in self.metrics.items())
        return "\n".join(drawn)

    def _repr_html_(self) -> str:
        return f'<div style="display:flex;flex-wrap:wrap">{self.svg()}</div>'


def _course(points: Mapping[int, Any]) -> str:
    """Return the first and last value: `0.4981 at step 6 -> 0.0213 at step 300`."""
    if shape := _shape(points):
        return f"array of {shape} at step {max(points)}"
    finite = [(step, value) for step, value in points.items() if math.isfinite(value)]
    if not finite:
        return "never finite"
    (first, first_value), (last, last_value) = finite[0], finite[-1]
    if first == last:
        return f"{format_number(last_value)} at step {last}"
    return (
        f"{format_number(first_value)} at step {first} -> {format_number(last_value)} at "
        f"step {last}"
    )


def _shape(points: Mapping[int, Any]) -> list[int]:
    """Return the shape of a metric's values; empty for numbers."""
    return list(np.shape(next(iter(points.values()), 0.0)))
