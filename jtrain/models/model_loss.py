"""Losses of a model, with its outputs: further metrics, and weights by class."""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np

from jtrain.core.loss import Stateful
from jtrain.core.mean import Mean
from jtrain.core.model import Model
from jtrain.core.rows import check_no_hidden_rows, row_keys
from jtrain.core.types import Batch, Extra, Key, Leaf, Metrics, Params, RowsInteract
from jtrain.errors import ConfigError, LossError
from jtrain.losses.metrics import Metric, exp_of_mean, find_metrics, perplexity
from jtrain.losses.shapes import spread_weights
from jtrain.models.adapters import EVALUATES, OF_BATCH, TRAINS, stateful_output

# A metric -> its sums over the outputs and the targets of a batch.
Measure: TypeAlias = Callable[[Metric], Mean]
# (params, extra, batch, rng) -> loss, metrics, extra, and what applies further metrics
Forward: TypeAlias = Callable[
    [Params, Extra, Batch, Key | None], tuple[Mean, Metrics, Extra, Measure]
]


@dataclasses.dataclass(frozen=True, eq=False)
class ModelLoss(Stateful):
    """A loss of a model's outputs, as `jt.fit` and `make_step` take it.

    The loss passes the model a key for each row in training, and the batch's mask where the model
    takes one. It carries the model's `extra`, the arrays beside its parameters. For a model without
    `extra` the loss can also be called as `loss(params, batch, rng)`.
    """

    model: Model
    inputs: tuple[str, ...]
    """Names of the model's inputs in a batch."""
    forward: Forward
    """The loss, and what applies further metrics."""
    metrics: Mapping[str, Metric]
    """Metrics that the loss returns."""
    labels: str = ""
    """Name of the classes in a batch; empty if the model predicts numbers or tokens."""
    kind: Literal["classes", "numbers"] = "classes"
    """What the model predicts."""

    @classmethod
    def of(
        cls, forward: Forward, model: Model, inputs: tuple[str, ...], **about: Any
    ) -> "ModelLoss":
        """Return the loss that `forward` computes."""
        loss = lambda *given: forward(*given)[:3]
        return cls(loss, model, inputs, forward, **about)

    def with_metrics(self, metrics: Sequence[str | Metric]) -> "ModelLoss":
        """Return the loss with further metrics: names and functions of `jt.metrics`, or functions.

        An evaluation has all of them, a step of training those that are means of rows.

        Raises:
            ConfigError: for an unknown name, or a metric of another kind of loss.
            LossError: when called, if a metric does not suit the outputs.
        """
        found = find_metrics(metrics, self.kind)
        more = {name: x for name, x in found.items() if self.metrics.get(name) is not x}
        if taken := more.keys() & self.metrics.keys():
            raise ConfigError(f"the loss has a metric {min(taken)!r} already: rename the function.")

        def forward(params: Params, extra: Extra, batch: Batch, rng: Key | None) -> Any:
            value, own, new, measure = self.forward(params, extra, batch, rng)
            added = {}
            for name, metric in more.items():
                of_loss = metric is perplexity
                mean = exp_of_mean(value) if of_loss else measure(metric)
                if rng is None or (type(mean) is Mean and not jnp.shape(mean.total)):
                    added[name] = mean
            return value, {**own, **added}, new, measure

        return self._with(forward, {**self.metrics, **more})

    def with_class_weight(self, weights: Any) -> "ModelLoss":
        """Return the loss that counts a row of training `weights[label]` times, 1 by default.

        An evaluation counts each row once.

        Args:
            weights: numbers by label, `{0: 1.0, 1: 3.0}`.

        Raises:
            ConfigError: if a weight is negative or no label, or the loss has no classes.
            LossError: when called, if a label is none of the model's classes.
        """
        _check_class_weight(weights, self)
        labels = np.array([*weights], np.int32)
        values = np.array([*weights.values()], np.float32)

        def check(logits: Any, *rest: Any) -> Mean:
            if max(weights) >= logits.shape[-1]:
                raise LossError(
                    f"class_weight has the label {max(weights)}, and the model {logits.shape[-1]} "
                    f"classes, 0 .. {logits.shape[-1] - 1}. Leave the label out, or give the model "
                    f"a class more."
                )
            return Mean(jnp.float32(0), jnp.float32(0))

        def forward(params: Params, extra: Extra, batch: Batch, rng: Key | None) -> Any:
            if rng is None:
                return self.forward(params, extra, batch, rng)
            y = jnp.asarray(named_array(batch, self.labels, "labels", "jt.classifier(model"))
            y = y[..., 0] if y.ndim > 1 and y.shape[-1] == 1 else y
            y = jnp.round(y) if jnp.issubdtype(y.dtype, jnp.floating) else y  # smoothed: 0.9 is 1
            is_label = y.astype(jnp.int32)[..., None] == jnp.expand_dims(labels, range(y.ndim))
            each = jnp.where(is_label, jnp.expand_dims(values, range(y.ndim)), 0).sum(-1)
            each = jnp.where(is_label.any(-1), each, 1)
            if "weight" in batch:
                each *= spread_weights(batch["weight"], each.shape).astype(each.dtype)
            found = self.forward(params, extra, {**batch, "weight": each}, rng)
            found[-1](check)
            return found

        return self._with(forward, self.metrics)

    def _with(self, forward: Forward, metrics: Mapping[str, Metric]) -> "ModelLoss":
        about = {"metrics": metrics, "labels": self.labels, "kind": self.kind}
        return ModelLoss.of(forward, self.model, self.inputs, **about)

    def __call__(self, params: Params, batch: Batch, rng: Key | None) -> tuple[Mean, Metrics]:
        """Return the loss and its metrics, for a model without `extra`."""
        value, metrics, _ = self.loss(params, {}, batch, rng)
        assert isinstance(value, Mean), "the loss of a model is one Mean"
        return value, metrics

    def outputs(self, params: Params, extra: Extra, batch: Batch) -> Any:
        """Return the model's outputs for a batch in evaluation: logits, predictions."""
        return apply_model(self.model, self.inputs, params, extra, batch, None)[0]

    @property
    def rows_interact(self) -> RowsInteract:
        """The coupling of a batch's rows by the model in training."""
        if self.model.rows_interact is not None:
            return self.model.rows_interact
        extra = jax.eval_shape(self.model.init, jax.random.key(0))[1]
        return "batch" if jax.tree.leaves(extra) else "never"


def _check_class_weight(weights: Any, loss: ModelLoss) -> None:
    if not loss.labels or "weight" in (loss.labels, *loss.inputs):
        raise ConfigError(
            "class_weight= is of jt.classifier and jt.binary_classifier, whose batches have no "
            "`weight` of another meaning. Give each row a weight: dict(x=..., y=..., weight=...)."
        )
    if not isinstance(weights, Mapping) or not weights:
        raise ConfigError(
            f"class_weight={weights!r}: write the weight of each label, {{0: 1.0, 1: 3.0}}."
        )
    for label, weight in weights.items():
        if int(label) != label or label < 0 or not weight >= 0:
            raise ConfigError(
                f"class_weight={{{label!r}: {weight!r}}}: a label is a whole number from 0 on, and "
                f"its weight 0 or more. Write {{0: 1.0, 1: 3.0}}."
            )


def apply_model(
    model: Model,
    inputs: tuple[str, ...],
    params: Params,
    extra: Extra,
    batch: Batch,
    rng: Key | None,
) -> tuple[Any, Extra]:
    """Apply the model to a batch; return the outputs, and `extra` as a loss returns it."""
    train = rng is not None
    options = {name: batch[name] for name in OF_BATCH if name in batch and name not in inputs}
    options |= dict.fromkeys(TRAINS, train) | dict.fromkeys(EVALUATES, not train)
    if train and "mask" not in model.named and model.rows_interact == "batch":
        check_no_hidden_rows("a batch norm that gets no mask")
    dtype = _narrow_dtype(params)
    arrays = [
        _cast(named_array(batch, name, "inputs", "jt.classifier(model"), dtype) for name in inputs
    ]
    named = {name: options[name] for name in model.named if name in options}
    carried = {} if type(extra) is tuple and not extra else extra  # () where none is given
    outputs, new = model.apply(params, carried, *arrays, rng=row_keys(rng, batch), **named)
    return outputs, stateful_output(extra, new, batch["mask"])


def named_array(batch: Batch, name: str, argument: str | None, call: str) -> Leaf:
    """Return the array `name` of a batch.

    Raises:
        LossError: if the batch has no such array.
    """
    if name in batch:
        return batch[name]
    present = [other for other in batch if other not in ("row", "mask")]
    raise LossError(
        f"the loss reads {name!r} in a batch, which has {', '.join(present)}. "
        + (
            f"Write {call}, {argument}={present[0]!r}), or name the array {name!r}."
            if argument
            else f"Name the array {name!r}: dict({name}=...)."
        )
    )


def _narrow_dtype(params: Params) -> Any:
    """Return the one dtype of all floating parameters if it is narrower than float32, else None."""
    types = {x.dtype for x in jax.tree.leaves(params) if jnp.issubdtype(x.dtype, jnp.floating)}
    (dtype,) = types if len(types) == 1 else (None,)
    return dtype if dtype is not None and dtype.itemsize < 4 else None


def _cast(x: Any, dtype: Any) -> Any:
    x = jnp.asarray(x)
    return x if dtype is None or not jnp.issubdtype(x.dtype, jnp.floating) else x.astype(dtype)
