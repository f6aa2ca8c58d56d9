"""Losses made from a model: classification, regression and language modelling."""

from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from jtrain.core.mean import Mean, sum_dtype
from jtrain.core.rows import row_keys
from jtrain.core.types import Batch, Extra, Key, Metrics, Params
from jtrain.errors import LossError
from jtrain.losses.chunked_next_token import chunked_next_token, sum_over_chunks
from jtrain.losses.cross_entropy import (
    binary_cross_entropy,
    cross_entropy_per_label,
    soft_cross_entropy,
)
from jtrain.losses.metrics import accuracy
from jtrain.losses.next_token import inputs_and_targets, next_token, segments_of
from jtrain.losses.shapes import in_domain, spread_weights
from jtrain.losses.squared_error import squared_error
from jtrain.models.adapters import AnyModel, as_model
from jtrain.models.model_loss import ModelLoss, apply_model, named_array

# (outputs, batch) -> loss, metrics, and the arguments of further metrics
Head: TypeAlias = Callable[[Any, Batch], tuple[Mean, Metrics, tuple[Any, Any, Any, Any]]]


def classifier(
    model: AnyModel,
    *,
    inputs: str | Sequence[str] = "x",
    labels: str = "y",
    smoothing: float = 0.0,
) -> ModelLoss:
    """Return the cross entropy of a model's logits, with the metric `accuracy`.

    If a batch has `weight`, a number a row, the loss and the metric count each row so many times.

    ```python
    net = nnx.Sequential(nnx.Linear(8, 64, rngs=rngs), nnx.relu, nnx.Linear(64, 3, rngs=rngs))
    result = jt.fit(jt.classifier(net), net, (x, y), epochs=5)
    ```

    Args:
        model: gives logits b ... c; a jt.Model, an nnx module, or a function of (params, *inputs).
        inputs: the name of the model's input in a batch, or several names.
        labels: the name of the classes, whole numbers b ... in 0 .. c-1, or of probabilities b c
            that add up to 1 in each row.
        smoothing: the share of each label that is spread over all classes.

    Raises:
        LossError: when called, if logits and labels do not match.
    """

    def head(logits: Any, batch: Batch) -> Any:
        wanted = named_array(batch, labels, "labels", "jt.classifier(model")
        if wanted.shape == logits.shape and jnp.issubdtype(wanted.dtype, jnp.floating):
            mask, weights = _counted(batch, inputs, labels)
            if weights is not None and weights.ndim > 1:
                raise LossError(
                    f"{labels!r} holds probabilities, and a weight is of a row: give `weight` one "
                    f"number a row; for class_weight= give labels, {labels}.argmax(-1)."
                )
            if weights is not None:  # what counts for nothing need not be a distribution
                wanted = jnp.where(mask[:, None], wanted, 1 / wanted.shape[-1])
            wanted = in_domain(wanted, "distributions")
            found = soft_cross_entropy(logits, wanted, mask, weights)
            return *found, (logits, wanted.argmax(-1), mask, weights)
        if wanted.ndim == logits.ndim and wanted.shape[-1] == 1:
            wanted = wanted[..., 0]
        _check_labels(logits, wanted, labels)
        of = logits, wanted, *_counted_targets(batch, inputs, labels, wanted)
        loss = cross_entropy_per_label(logits, wanted, smoothing)
        return Mean.of(loss, *of[2:]), {"accuracy": accuracy(*of)}, of

    return _loss_of(model, inputs, head, labels=labels, metrics={"accuracy": accuracy})


def binary_classifier(
    model: AnyModel, *, inputs: str | Sequence[str] = "x", labels: str = "y"
) -> ModelLoss:
    """Return the binary cross entropy of a model's logits, with the metric `accuracy`.

    `weight` in a batch is that of `classifier`.

    Args:
        model: gives a logit a row, b or b 1, or several that are each true or false, b n.
        inputs: the name of the model's input in a batch, or several names.
        labels: the name of the labels: 0 or 1, of the shape of the logits.

    Raises:
        LossError: when called, if logits and labels do not match.
    """

    def head(logits: Any, batch: Batch) -> Any:
        wanted = named_array(batch, labels, "labels", "jt.binary_classifier(model")
        logits, wanted = _alike(logits, wanted, labels, "logits")
        wanted = wanted.astype(sum_dtype(wanted))
        found = binary_cross_entropy(logits, wanted, *_counted(batch, inputs, labels))
        both = jnp.stack([jnp.zeros_like(logits), logits], -1)
        counted = _counted_targets(batch, inputs, labels, wanted)
        return *found, (both, (wanted > 0.5).astype(jnp.int32), *counted)

    return _loss_of(model, inputs, head, labels=labels, metrics={"accuracy": accuracy})


def regression(
    model: AnyModel, *, inputs: str | Sequence[str] = "x", targets: str = "y"
) -> ModelLoss:
    """Return the mean squared error of a model's outputs, with the metric `absolute_error`.

    `weight` in a batch is that of `classifier`.

    Args:
        model: gives a number a row, b or b 1, or several, b n.
        inputs: the name of the model's input in a batch, or several names.
        targets: the name of the targets, of the same shape.

    Raises:
        LossError: when called, if outputs and targets do not match.
    """

    def head(outputs: Any, batch: Batch) -> Any:
        wanted = named_array(batch, targets, "targets", "jt.regression(model")
        outputs, wanted = _alike(outputs, wanted, targets, "outputs")
        wanted = wanted.astype(sum_dtype(wanted))
        found = squared_error(outputs, wanted, *_counted(batch, inputs, targets))
        return *found, (outputs, wanted, *_counted_targets(batch, inputs, targets, wanted))

    return _loss_of(model, inputs, head, kind="numbers", metrics={})


def language_model(model: AnyModel) -> ModelLoss:
    """Return the cross entropy of the next token, with the metric `accuracy`.

    A batch has `tokens`, b t+1, as jtrain's text data has, and optionally `length` and `segments`,
    which a model of packed rows takes by the name `segments`, b t. A `weight`, of each row or each
    target (b t), is how many times a target counts. With a jtrain Transformer the
    logits of a batch never exist all at once.

    Args:
        model: gives logits b t v for tokens b t.

    Raises:
        LossError: when called, if the batch has no tokens, the logits have another shape, or rows
            are packed and the model takes no `segments`.
    """
    model = as_model(model)

    def forward(params: Params, extra: Extra, batch: Batch, rng: Key | None) -> Any:
        named_array(batch, "tokens", None, "")
        inputs, targets, real = inputs_and_targets(batch)
        weights = batch.get("weight")
        if (each := spread_weights(weights, real.shape)) is not None:
            real &= each != 0
        if hasattr(model, "hidden"):  # a LanguageModel
            keys, segments = row_keys(rng, batch), segments_of(batch)
            (hidden, routed), _ = model.routed(params, extra, inputs, segments, rng=keys)
            extra = model.update_bias(extra, routed, real)
            head, cap = model.head(params), model.logit_cap
            value, metrics = chunked_next_token(hidden, head, targets, real, weights, soft_cap=cap)
            known = *jax.lax.stop_gradient((hidden, head)), targets, real, each
            measure = lambda metric: sum_over_chunks(metric, *known, soft_cap=cap)
            return value, metrics, extra, measure
        inner = {**batch, "tokens": inputs}
        if "segments" in batch:
            if "segments" not in model.named:
                raise LossError(
                    "the rows are packed, and the model takes only their tokens, so that each "
                    "document sees those before it in its row. Take segments (whole numbers, rows "
                    "x tokens) as an argument of that name: def __call__(self, tokens, segments)."
                )
            inner["segments"] = segments_of(batch)
        logits, new = apply_model(model, ("tokens",), params, extra, inner, rng)
        if logits.shape[:-1] != targets.shape:
            raise LossError(
                f"a language model gives logits of {list(targets.shape)} x the vocabulary for "
                f"tokens of shape {list(inputs.shape)}, and this one gave {list(logits.shape)}. "
                f"Return the logits of every position."
            )
        measure = lambda metric: metric(jax.lax.stop_gradient(logits), targets, real, each)
        return *next_token(logits, targets, real, weights), new, measure

    return ModelLoss.of(forward, model, ("tokens",), metrics={"accuracy": accuracy})


def _loss_of(model: AnyModel, inputs: str | Sequence[str], head: Head, **about: Any) -> ModelLoss:
    """Return the loss that applies `head` to a model's outputs."""
    model = as_model(model)
    names = (inputs,) if isinstance(inputs, str) else tuple(inputs)

    def forward(params: Params, extra: Extra, batch: Batch, rng: Key | None) -> Any:
        outputs, new = apply_model(model, names, params, extra, batch, rng)
        value, metrics, (given, *others) = head(outputs, batch)
        measure = lambda metric: metric(jax.lax.stop_gradient(given), *others)
        return value, metrics, new, measure

    return ModelLoss.of(forward, model, names, **about)


def _counted_targets(
    batch: Batch, inputs: str | Sequence[str], name: str, targets: Any
) -> tuple[Array, Array | None]:
    """Return the mask and the weights of a batch for each target."""
    mask, weights = _counted(batch, inputs, name)
    return _by_row(mask, targets), spread_weights(weights, targets.shape)


def _counted(batch: Batch, inputs: str | Sequence[str], targets: str) -> tuple[Array, Array | None]:
    """Return the mask of a batch and its `weight`, unless the loss reads that as data.

    A weight of 0 hides its row, whatever the row holds.
    """
    if misnamed := {"sample_weight", "sample_weights"} & batch.keys() - {*inputs, targets}:
        raise LossError(f"{misnamed.pop()!r} of the data is not read: name it 'weight'.")
    weights = None if "weight" in (inputs, *inputs, targets) else batch.get("weight")
    mask = batch["mask"]
    return mask if weights is None or weights.ndim > 1 else mask & (weights != 0), weights


def _check_labels(logits: Any, labels: Any, name: str) -> None:
    """Raise unless labels are whole numbers with one for each vector of logits."""
    if labels.shape == logits.shape and labels.ndim > 1 and labels.shape[-1] > 1:
        raise LossError(
            f"{name!r} has the shape {list(labels.shape)} of the logits and holds {labels.dtype}: "
            f"one-hot rows are probabilities, {name}.astype(np.float32), or give labels, "
            f"{name}.argmax(-1). For several answers of yes or no a row take jt.binary_classifier."
        )
    if not jnp.issubdtype(labels.dtype, jnp.integer):
        raise LossError(
            f"labels are whole numbers that count classes from 0, and {name!r} holds "
            f"{labels.dtype}. Make them whole where the data is made: {name}.astype(np.int32)."
        )
    if logits.shape[:-1] == labels.shape and logits.shape[-1] > 1:
        return
    single = logits.shape[-1:] == (1,) or logits.shape == labels.shape
    advice = (
        "For one logit a row take jt.binary_classifier; for classes give the last layer as many "
        "outputs as there are classes."
        if single
        else "Give the model a last layer that turns each row into as many numbers as there are "
        "classes, rows first."
    )
    raise LossError(
        f"a classifier gives logits of shape {[*labels.shape, 'classes']} for labels of shape "
        f"{list(labels.shape)}, and the model gave {list(logits.shape)}. {advice}"
    )


def _alike(outputs: Any, wanted: Any, name: str, what: str) -> tuple[Any, Any]:
    """Return both in one shape; a last dim of 1 that only one of them has is dropped."""
    if outputs.ndim == wanted.ndim + 1 and outputs.shape[-1] == 1:
        outputs = outputs[..., 0]
    elif wanted.ndim == outputs.ndim + 1 and wanted.shape[-1] == 1:
        wanted = wanted[..., 0]
    if outputs.shape != wanted.shape:
        raise LossError(
            f"the model gave {what} of shape {list(outputs.shape)}, and {name!r} has shape "
            f"{list(wanted.shape)}. Give the last layer as many outputs as {name!r} has numbers a "
            f"row: {int(np.prod(wanted.shape[1:], dtype=int))}."
        )
    return outputs, wanted


def _by_row(mask: Any, like: Any) -> Any:
    """Broadcast the mask of rows to the shape of `like`."""
    return jnp.broadcast_to(jnp.expand_dims(mask, range(1, like.ndim)), like.shape)
