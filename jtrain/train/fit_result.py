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
from jtrain.core.types import Extra, Params, RowsInteract
from jtrain.errors import ConfigError, LossError
from jtrain.errors.spelling import nearest_choice
from jtrain.io.formatting import format_number
from jtrain.losses.metrics import Metric
from jtrain.models.model_loss import ModelLoss
from jtrain.train import fit_arguments, fit_data
from jtrain.train.charts import svg_chart, text_chart
from jtrain.train.hooks.evaluation import EvaluationResult
from jtrain.train.predict import evaluate, predict

INNER = {"grad_norm", "update_norm", "skipped", "loss_scale"}  # metrics that are not shown


MOST_SHOWN = 25  # entries of an array


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

    def save(self, path: Path | str) -> Path:
        """Write the parameters to use, and `extra`, to a .safetensors file; `jt.load` reads it.

        Raises:
            CheckpointError: for another suffix, or if the file cannot be written.
        """
        step = self.best.step if self.best else self.step
        fit_data.write_weights(Path(path), self.params, self.extra, step)
        return Path(path)

    def evaluate(
        self,
        data: fit_data.Data,
        *,
        metrics: Sequence[str | Metric] = (),
        batch: int = 0,
        rows_interact: RowsInteract | None = None,
    ) -> dict[str, Any]:
        """Return the loss and the metrics over all of `data`; see `jt.evaluate`.

        Args:
            data: as for `jt.fit`.
            metrics: beside those given to `jt.fit`.
            batch: rows at a time.
            rows_interact: as for `jt.evaluate`; by default as given to `jt.fit`. In the layers of a
                model (batch norm) rows interact in training only.

        Raises:
            LossError: if coupled rows would be split.
        """
        assert self.start is not None, "jt.fit sets `start`"
        loss = fit_arguments.build_loss(self.loss, metrics)
        if rows_interact is None:
            layers = isinstance(self.loss, ModelLoss) or not self.start.declared
            rows_interact = "never" if layers else self.start.rows_interact
        return evaluate(
            self.start.loss if loss is self.loss else loss,
            self.params,
            data,
            batch=batch,
            extra=self.extra,
            rows_interact=rows_interact,
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

    def plot(self, *names: str) -> "MetricCurves":
        """Return the curves of some metrics, by default of the loss and the evaluated metrics.

        A notebook shows them as a picture, a terminal as text; `.save("curves.html")` writes them.

        Args:
            names: of metrics, "loss" or "accuracy"; each is drawn for all its sets.

        Raises:
            ConfigError: for an unknown metric.
        """
        curves: dict[str, dict[str, Mapping[int, float]]] = {}
        for full, points in self.history.items():
            set_name, _, name = full.rpartition("/")
            if not _shape(points):
                curves.setdefault(name, {})[set_name or "train"] = points
        for name in names:
            if name not in curves:
                raise ConfigError(
                    f"{name!r} is not a metric of the history, which has {', '.join(curves)}; an "
                    f"array has no curve, but its values: result.history[NAME]. Write "
                    f'result.plot("{nearest_choice(name, curves) or "loss"}").'
                )
        evaluated = [n for n, lines in curves.items() if set(lines) - {"train"} and n != "rows"]
        chosen = names or dict.fromkeys(["loss", *evaluated])
        return MetricCurves({name: curves[name] for name in chosen})

    def __repr__(self) -> str:
        """Return at most ten lines: what was trained, the results, and what to type next."""
        leaves = named_leaves(self.params)
        shapes = [f"{name or 'array'} {list(np.shape(leaf))}" for name, leaf in leaves.items()]
        more = f", and {len(shapes) - 3} more" if len(shapes) > 3 else ""
        shown = [name for name in self.history if name.rpartition("/")[2] not in {*INNER, "rows"}]
        shown.sort(key=lambda name: ("/" not in name, not name.endswith("loss")))
        lines = [
            f"Fitted: {self.step} steps, {num_elements(self.params):,} parameters "
            f"({', '.join(shapes[:3])}{more})",
            *(f"  {name:18} {_course(self.history[name])}" for name in shown[:5]),
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
        return f"<div><pre>{html.escape(repr(self))}</pre>{self.plot()._repr_html_()}</div>"

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

    def save(self, path: Path | str) -> Path:
        """Write the charts to a page, curves.html.

        Raises:
            ConfigError: for another suffix.
        """
        path = Path(path)
        if path.suffix != ".html":
            raise ConfigError(f"{path}: charts are written as a page. Name it curves.html.")
        path.write_text(self._repr_html_(), encoding="utf-8")
        return path

    def __repr__(self) -> str:
        """Return the curves as text."""
        drawn = (f"{n}\n{text_chart(lines, height=14)}" for n, lines in self.metrics.items())
        return "\n".join(drawn)

    def _repr_html_(self) -> str:
        charts = "".join(svg_chart(name, lines) for name, lines in self.metrics.items())
        return f'<div style="display:flex;flex-wrap:wrap">{charts}</div>'


def _course(points: Mapping[int, Any]) -> str:
    """Return the first and last value: `0.4981 at step 6 -> 0.0213 at step 300`."""
    if shape := _shape(points):
        if np.prod(shape) <= MOST_SHOWN:
            last = np.array2string(np.asarray(points[max(points)]), separator=" ", precision=4)
            return f"{' '.join(last.split())} at step {max(points)}"
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
    return list(np.shape(next(iter(points.values()), 0.0)))
