"""Losses made of a model: a classifier, a regression, a language model."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np

from jtrain.core.loss import Stateful
from jtrain.core.mean import Mean
from jtrain.core.model import Model
from jtrain.core.rows import check_no_hidden_rows, row_keys
from jtrain.core.types import Batch, Couples, Extra, Key, Leaf, Metrics, Params
from jtrain.errors import LossError
from jtrain.losses.binary_cross_entropy import binary_cross_entropy
from jtrain.losses.chunked_next_token import chunked_next_token
from jtrain.losses.cross_entropy import nats
from jtrain.losses.next_token import inputs_and_targets, next_token, segments_of
from jtrain.losses.soft_cross_entropy import soft_cross_entropy
from jtrain.losses.squared_error import squared_error
from jtrain.models.adapters.any_model import AnyModel, as_model
from jtrain.models.adapters.statistics import carried
from jtrain.models.adapters.switch import RESTS, TRAINS

# (outputs, batch) -> what is minimised, and metrics
Head: TypeAlias = Callable[[Any, Batch], tuple[Mean, Metrics]]


@dataclasses.dataclass(frozen=True, eq=False)
class ModelLoss(Stateful):
    """A loss of a model's outputs, as `jt.fit` and `make_step` take it.

    It hands the model a key for each row while it trains, the batch's mask where the model takes
    one, and carries what the model has beside its parameters (`extra`). Where there is none it can
    also be called as any loss: `loss(params, batch, rng)`.
    """

    model: Model
    inputs: tuple[str, ...]
    """The names of what the model takes in a batch."""

    def __call__(self, params: Params, batch: Batch, rng: Key | None) -> tuple[Mean, Metrics]:
        """Return the loss and its metrics, of a model without `extra`."""
        value, metrics, _ = self.loss(params, {}, batch, rng)
        assert isinstance(value, Mean), "a loss made of a model is one Mean"
        return value, metrics

    def outputs(self, params: Params, extra: Extra, batch: Batch) -> Any:
        """Return what the model gives for a batch, nothing drawn: logits, predictions."""
        return _applied(self.model, self.inputs, params, extra, batch, None)[0]

    @property
    def couples(self) -> Couples:
        """What the model does to the rows of a batch while it trains."""
        if self.model.couples is not None:
            return self.model.couples
        extra = jax.eval_shape(self.model.init, jax.random.key(0))[1]
        return "batch" if jax.tree.leaves(extra) else "nothing"


def classifier(
    model: AnyModel,
    *,
    inputs: str | Sequence[str] = "x",
    labels: str = "y",
    smoothing: float = 0.0,
) -> ModelLoss:
    """Return the cross entropy of a model's logits, with the metric `accuracy`.

    ```python
    net = nnx.Sequential(nnx.Linear(8, 64, rngs=rngs), nnx.relu, nnx.Linear(64, 3, rngs=rngs))
    result = jt.fit(jt.classifier(net), net, (x, y), epochs=5)
    ```

    Args:
        model: gives logits b ... c; a jt.Model, an nnx module, or a function of (params, *inputs).
        inputs: the name of what it takes in a batch, or several.
        labels: the name of the classes, whole numbers b ... in 0 .. c-1; or of chances b c.
        smoothing: the share of each label that is spread over all classes.

    Raises:
        LossError: when it is called, if logits and labels do not fit together.
    """

    def head(logits: Any, batch: Batch) -> tuple[Mean, Metrics]:
        wanted = _named(batch, labels, "labels", "jt.classifier(model")
        if wanted.shape == logits.shape and jnp.issubdtype(wanted.dtype, jnp.floating):
            return soft_cross_entropy(logits, wanted, batch["mask"])
        if wanted.ndim == logits.ndim and wanted.shape[-1] == 1:
            wanted = wanted[..., 0]
        _check_labels(logits, wanted, labels)
        hits = (logits.argmax(-1) == wanted).astype(jnp.float32)
        real = _by_row(batch["mask"], wanted)
        return Mean.of(nats(logits, wanted, smoothing), real), {"accuracy": Mean.of(hits, real)}

    return _loss_of(model, inputs, head)


def binary_classifier(
    model: AnyModel, *, inputs: str | Sequence[str] = "x", labels: str = "y"
) -> ModelLoss:
    """Return the binary cross entropy of a model's logits, with the metric `accuracy`.

    Args:
        model: gives a logit a row, b or b 1, or several that are each true or false, b n.
        inputs: the name of what it takes in a batch, or several.
        labels: the name of what is true: 0 or 1, of the shape of the logits.

    Raises:
        LossError: when it is called, if logits and labels do not fit together.
    """

    def head(logits: Any, batch: Batch) -> tuple[Mean, Metrics]:
        wanted = _named(batch, labels, "labels", "jt.binary_classifier(model")
        logits, wanted = _alike(logits, wanted, labels, "logits")
        return binary_cross_entropy(logits, wanted.astype(jnp.float32), batch["mask"])

    return _loss_of(model, inputs, head)


def regression(
    model: AnyModel, *, inputs: str | Sequence[str] = "x", targets: str = "y"
) -> ModelLoss:
    """Return the mean squared error of a model's outputs, with the metric `absolute_error`.

    Args:
        model: gives a number a row, b or b 1, or several, b n.
        inputs: the name of what it takes in a batch, or several.
        targets: the name of what it is to give, of the same shape.

    Raises:
        LossError: when it is called, if outputs and targets do not fit together.
    """

    def head(outputs: Any, batch: Batch) -> tuple[Mean, Metrics]:
        wanted = _named(batch, targets, "targets", "jt.regression(model")
        outputs, wanted = _alike(outputs, wanted, targets, "outputs")
        return squared_error(outputs, wanted.astype(jnp.float32), batch["mask"])

    return _loss_of(model, inputs, head)


def language_model(model: AnyModel) -> ModelLoss:
    """Return the cross entropy of the next token, with the metric `accuracy`.

    A batch has `tokens`, b t+1, as the text data of jtrain gives them, and perhaps `length` and
    `segments`. Of a Transformer of jtrain the logits are never there all at once.

    Args:
        model: gives logits b t v for tokens b t.

    Raises:
        LossError: when it is called, if the batch has no tokens, or the logits another shape.
    """
    model = as_model(model)

    def loss(
        params: Params, extra: Extra, batch: Batch, rng: Key | None
    ) -> tuple[Mean, Metrics, Extra]:
        _named(batch, "tokens", None, "")
        inputs, targets, real = inputs_and_targets(batch)
        if hasattr(model, "hidden"):  # a LanguageModel
            keys = None if rng is None else row_keys(rng, batch)
            given = (params, extra, None, rng is not None, inputs, keys, segments_of(batch))
            hidden, extra = model.hidden(*given)
            cap = model.values.logit_cap
            known = hidden, model.head(params), targets, real
            return *chunked_next_token(*known, soft_cap=cap), extra
        logits, new = _applied(model, ("tokens",), params, extra, {**batch, "tokens": inputs}, rng)
        if logits.shape[:-1] != targets.shape:
            raise LossError(
                f"a language model gives logits of {list(targets.shape)} x the vocabulary for "
                f"tokens of shape {list(inputs.shape)}, and this one gave {list(logits.shape)}. "
                f"Return the logits of every position."
            )
        return *next_token(logits, targets, real), new

    return ModelLoss(loss, model, ("tokens",))


def _loss_of(model: AnyModel, inputs: str | Sequence[str], head: Head) -> ModelLoss:
    """The loss that `head` is of a model's outputs."""
    model = as_model(model)
    names = (inputs,) if isinstance(inputs, str) else tuple(inputs)

    def loss(
        params: Params, extra: Extra, batch: Batch, rng: Key | None
    ) -> tuple[Mean, Metrics, Extra]:
        outputs, new = _applied(model, names, params, extra, batch, rng)
        return *head(outputs, batch), new

    return ModelLoss(loss, model, names)


def _applied(
    model: Model,
    inputs: tuple[str, ...],
    params: Params,
    extra: Extra,
    batch: Batch,
    rng: Key | None,
) -> tuple[Any, Extra]:
    """The outputs, and `extra` as a loss returns it."""
    train = rng is not None
    keys = None if rng is None else row_keys(rng, batch)
    offered = {"keys": keys, "mask": batch["mask"]}
    offered |= dict.fromkeys(TRAINS, train) | dict.fromkeys(RESTS, not train)
    if train and "mask" not in model.named and model.couples == "batch":
        check_no_hidden_rows("a batch norm that gets no mask")
    dtype = _narrow(params)
    given = [_cast(_named(batch, name, "inputs", "jt.classifier(model"), dtype) for name in inputs]
    named = {name: offered[name] for name in model.named}
    outputs, new = model.apply(params, extra, keys, train, *given, **named)
    return outputs, carried(extra, new, batch["mask"])


def _narrow(params: Params) -> Any:
    """The type that all parameters with a fraction have, if it is narrower than float32."""
    types = {x.dtype for x in jax.tree.leaves(params) if jnp.issubdtype(x.dtype, jnp.floating)}
    (dtype,) = types if len(types) == 1 else (None,)
    return dtype if dtype is not None and dtype.itemsize < 4 else None


def _cast(x: Any, dtype: Any) -> Any:
    x = jnp.asarray(x)
    return x if dtype is None or not jnp.issubdtype(x.dtype, jnp.floating) else x.astype(dtype)


def _named(batch: Batch, name: str, argument: str | None, call: str) -> Leaf:
    """The array of a batch.

    Raises:
        LossError: if there is none of that name.
    """
    if name in batch:
        return batch[name]
    there = [other for other in batch if other not in ("row", "mask")]
    raise LossError(
        f"the loss reads {name!r} in a batch, which has {', '.join(there)}. "
        + (
            f"Write {call}, {argument}={there[0]!r}), or name the array {name!r}."
            if argument
            else f"Name the array {name!r}: dict({name}=...)."
        )
    )


def _check_labels(logits: Any, labels: Any, name: str) -> None:
    """Check that labels are whole numbers of as many rows as the logits."""
    if not jnp.issubdtype(labels.dtype, jnp.integer):
        raise LossError(
            f"labels are whole numbers that count classes from 0, and {name!r} holds "
            f"{labels.dtype}. Make them whole where the data is made: {name}.astype(np.int32)."
        )
    if logits.shape[:-1] == labels.shape and logits.shape[-1] > 1:
        return
    one = logits.shape[-1:] == (1,) or logits.shape == labels.shape
    advice = (
        "For one logit a row take jt.binary_classifier; for classes give the last layer as many "
        "outputs as there are classes."
        if one
        else "Give the model a last layer that turns each row into as many numbers as there are "
        "classes, rows first."
    )
    raise LossError(
        f"a classifier gives logits of shape {[*labels.shape, 'classes']} for labels of shape "
        f"{list(labels.shape)}, and the model gave {list(logits.shape)}. {advice}"
    )


def _alike(outputs: Any, wanted: Any, name: str, what: str) -> tuple[Any, Any]:
    """Both in one shape; a last dim of 1 that only one of them has is left out."""
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
    """The mask of the rows, of the shape of `like`."""
    return jnp.broadcast_to(jnp.expand_dims(mask, range(1, like.ndim)), like.shape)
