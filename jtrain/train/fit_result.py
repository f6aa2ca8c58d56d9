"""The result of jt.fit: parameters, numbers, pictures, and what can be done with them."""

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
from jtrain.io.formatting import number
from jtrain.models.model_loss import ModelLoss
from jtrain.train import fit_arguments
from jtrain.train.hooks.curve import curve
from jtrain.train.hooks.evaluation import EvaluationResult
from jtrain.train.predict import evaluate, predict
from jtrain.train.svg_chart import chart

INNER = {"grad_norm", "update_norm", "skipped", "loss_scale"}  # are no results


@dataclasses.dataclass(frozen=True, repr=False)
class Fitted:
    """What training came to."""

    params: Params
    """Those to use: of the last step, or of the best evaluation if `best` was asked for; the
    average, with an optimizer that keeps one."""
    extra: Extra
    """What is carried beside them."""
    state: TrainState
    """All of it after the last step."""
    history: Mapping[str, Mapping[int, Any]]
    """Of each name the numbers by step: `history["loss"][100]`, `history["valid/loss"]`. Those of
    the last step are always there."""
    step: int
    """The last that was taken."""
    best: EvaluationResult | None
    """The best evaluation, its step and its numbers; None unless it was asked for."""
    why: str
    """Why it ended, if before the last step."""
    directory: Path | None
    """Of the run, if there is one."""
    loss: Any = None
    """That was minimised."""
    start: fit_arguments.FitStart | None = None
    """Where it began."""

    @property
    def model(self) -> Any:
        """The nnx module that was trained, with the parameters to use, switched to evaluation.

        Raises:
            ConfigError: if the parameters were given as arrays.
        """
        module = None if self.start is None else self.start.module
        if module is None:
            raise ConfigError(
                "there is no model: fit was given arrays for parameters. Take result.params, or "
                "give fit the nnx module itself: jt.fit(loss, module, data)."
            )
        return module.module(self.params, self.extra, None, False)

    def evaluate(
        self, data: fit_arguments.Data, *, batch: int = 0, couples: Couples | None = None
    ) -> dict[str, float]:
        """Return the loss and the metrics over all of `data`; see `jt.evaluate`.

        Args:
            data: as for `jt.fit`.
            batch: rows at a time.
            couples: as for `jt.evaluate`; by default what `jt.fit` was given. The layers of a model
                (batch norm) make rows meet in training alone.

        Raises:
            LossError: if rows meet that would be split.
        """
        assert self.start is not None, "jt.fit says what it trained"
        if couples is None:
            couples = "nothing" if isinstance(self.loss, ModelLoss) else self.start.couples
        return evaluate(
            self.start.loss, self.params, data, batch=batch, extra=self.extra, couples=couples
        )

    def predict(self, data: fit_arguments.Data, *, batch: int = 0) -> Any:
        """Return what the model gives for each row of `data`; see `jt.predict`.

        Raises:
            LossError: if the loss was not made of a model (`jt.classifier` and the like).
        """
        if not isinstance(self.loss, ModelLoss):
            raise LossError(
                "the loss is a function of its own, and does not say what the model gives. Write "
                "jt.predict(apply, result.params, data) with apply(params, batch), or make the "
                "loss of a model: jt.classifier(model), jt.regression(model)."
            )
        return predict(self.loss, self.params, data, batch=batch, extra=self.extra)

    def plot(self, *names: str, ax: Any = None) -> "MetricCurves":
        """Return the curves of these metrics, by default the loss and what was evaluated.

        In a notebook they are a picture, elsewhere a text; `.save("curves.svg")` writes them.

        Args:
            names: of metrics, "loss" or "accuracy", each with all the sets that it was taken of.
            ax: axes of matplotlib to draw the first of them on, besides.

        Raises:
            ConfigError: for a metric that there is none of.
        """
        there = list(dict.fromkeys(name.rpartition("/")[2] for name in self.history))
        judged = [name.rpartition("/")[2] for name in self.history if "/" in name]
        chosen = names or ("loss", *dict.fromkeys(n for n in judged if n not in ("loss", "rows")))
        for name in chosen:
            if name not in there:
                raise ConfigError(
                    f"{name!r} is no metric of the history, which has {', '.join(there)}. Write "
                    f'result.plot("{there[0] if there else "loss"}").'
                )
        found = MetricCurves(
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
            found.draw(ax)
        return found

    def __repr__(self) -> str:
        """Return ten lines at most: what was trained, what it came to, and what to type next."""
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
            numbers = [f"{name} {number(x)}" for name, x in self.best.numbers.items()]
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
        """Each metric and how it went, the validation's first; at most so many."""
        shown = [name for name in self.history if name.rpartition("/")[2] not in {*INNER, "rows"}]
        shown.sort(key=lambda name: ("/" not in name, not name.endswith("loss")))
        return [(name, _course(self.history[name])) for name in shown[:most]]

    def _next(self) -> list[str]:
        able = ["result.predict(x)"] if isinstance(self.loss, ModelLoss) else []
        has = self.start is not None and self.start.module is not None
        module = ["result.model"] if has else []
        judge = ["result.evaluate(data)"]
        return ["result.plot()", *judge, *able, *module, "result.params", 'result.history["loss"]']


@dataclasses.dataclass(frozen=True, repr=False)
class MetricCurves:
    """Lines over the step: for each metric those of training and of each set."""

    metrics: Mapping[str, Mapping[str, Mapping[int, float]]]

    def svg(self) -> str:
        """Return the charts as SVG, one beside the other."""
        return "".join(chart(name, lines) for name, lines in self.metrics.items())

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
        """Draw the first metric on axes of matplotlib, and return those."""
        name, lines = next(iter(self.metrics.items()))
        for label, points in lines.items():
            ax.plot(list(points), list(points.values()), label=label)
        ax.set_xlabel("step")
        ax.set_ylabel(name)
        ax.legend()
        return ax

    def __repr__(self) -> str:
        """Return the curves as text."""
        drawn = [
            f"{name}\n{curve({n: list(p.items()) for n, p in lines.items()}, height=14)}"
            for name, lines in self.metrics.items()
        ]
        return "\n".join(drawn)

    def _repr_html_(self) -> str:
        return f'<div style="display:flex;flex-wrap:wrap">{self.svg()}</div>'


def _course(points: Mapping[int, Any]) -> str:
    """`0.4981 at step 6 -> 0.0213 at step 300`."""
    finite = [(step, value) for step, value in points.items() if math.isfinite(value)]
    if not finite:
        return "never finite"
    (first, begun), (last, ended) = finite[0], finite[-1]
    if first == last:
        return f"{number(ended)} at step {last}"
    return f"{number(begun)} at step {first} -> {number(ended)} at step {last}"
