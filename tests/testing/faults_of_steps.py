"""A handwritten step with one fault at a time, and strategies with wrong sums.

The museum has more (test_museum.py).
"""

import copy
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from planted import dropout, errors, good, height, line, points

from jtrain.core.loss import combine, normalize_loss, stateful, update_extra
from jtrain.core.mean import Mean
from jtrain.core.rows import with_rows
from jtrain.core.state import TrainState
from jtrain.parallel import Mirrored


class Fault(NamedTuple):
    """A faulty and a corrected loss, with the cause that a check must report."""

    wrong: dict[str, Any]  # arguments of assert_invariant
    right: dict[str, Any]
    cause: str
    message: str  # words of the explanation


def auxiliary(params, batch):
    return Mean.of(jnp.square(height(params, batch)), batch["mask"])


AXIS = "data"
SGD = optax.sgd(0.1)
CLIPPED = optax.chain(optax.clip_by_global_norm(0.5), SGD)
DECAYED = optax.chain(optax.add_decayed_weights(0.1), SGD)


def handwritten(wrong=""):
    """Return a step factory as a user writes it, with the fault `wrong`."""
    return functools.partial(_make, wrong)


def _make(  # noqa: C901, PLR0915  a typical step, with every fault
    wrong, loss, optimizer, *, microbatches=1, psum=None, ragged=False, **unused
):
    terms = normalize_loss(loss, ragged=ragged)
    add = psum or (lambda tree: tree)

    def parts_of(batch):
        slice_of = lambda i: jax.tree.map(lambda x: x[i::microbatches], batch)
        return [slice_of(i) for i in range(microbatches)]

    def step(state, batch):  # noqa: C901, PLR0915
        batch, rng = with_rows(batch), state.step_key()
        if wrong == "key of the device" and psum:
            rng = jax.random.fold_in(rng, jax.lax.axis_index(AXIS))
        params, parts = state.params, parts_of(batch)
        weights = [_weights(terms, state, part) for part in parts]
        full_weights = add(jax.tree.map(lambda *w: sum(w), *weights))
        if wrong == "padded size":
            full_weights = [add(jnp.float32(len(batch["mask"]))) for _ in full_weights]
        values, grads, metrics, changes = [], [], [], []
        for number, (part, own) in enumerate(zip(parts, weights, strict=True)):
            key = jax.random.fold_in(rng, number) if wrong == "key of the microbatch" else rng
            divide = full_weights
            if wrong == "auxiliary":  # the auxiliary mean, once for each microbatch
                divide = [divide[0], jnp.maximum(own[1], 1)]

            def share(params, part=part, key=key, divide=divide):
                output = terms(params, state.extra, part, key)
                return combine(output.terms, divide), output

            (value, output), grad = jax.value_and_grad(share, has_aux=True)(params)
            if wrong == "sign":
                grad = jax.tree.map(jnp.sign, grad)
            if wrong == "clip":
                grad = optax.clip_by_global_norm(0.5).update(grad, optax.EmptyState())[0]
            if wrong == "bfloat16":
                grad = jax.tree.map(lambda g: g.astype(jnp.bfloat16), grad)
            values.append(value)
            grads.append(grad)
            metrics.append(output.metrics)
            changes.append(output.extra)
        total = lambda parts: add(jax.tree.map(lambda *x: sum(x), *parts))
        value, grad = total(values), total(grads)
        grad = jax.tree.map(lambda g: g.astype(jnp.float32), grad)
        if wrong == "double sum":
            value, grad = add((value, grad))
        if wrong == "overwritten":
            grad = grads[-1]
        if wrong == "loss scale":
            grad = jax.tree.map(lambda x: x * 2.0**10, grad)
        if wrong == "metric":
            mean = lambda *parts: Mean(
                sum(m.total / jnp.maximum(m.weight, 1) for m in parts), jnp.float32(len(parts))
            )
            summed_metrics = jax.tree.map(mean, *metrics, is_leaf=lambda x: isinstance(x, Mean))
        else:
            summed_metrics = total(metrics)
        opt_state = state.opt_state
        updates, opt_state = optimizer.update(grad, opt_state, params)
        params = optax.apply_updates(params, updates)
        if wrong == "decay":
            params = jax.tree.map(
                lambda new, old: new - 0.01 * (microbatches - 1) * old, params, state.params
            )
        if wrong == "stale":
            stale = jax.tree.map(
                lambda old, now: 0.9 * old + 0.1 * now, state.opt_state.inner[1], state.params
            )
            opt_state = opt_state._replace(inner=(opt_state.inner[0], stale))
        last = changes[-1] if wrong == "last statistics" else total(changes)
        kept = {"skipped": state.skipped, "scale": state.scale, "seed": state.seed}
        made = {"params": params, "extra": update_extra(state.extra, last), "opt_state": opt_state}
        after = TrainState(step=state.step + 1, **made, **kept)
        return after, {**summed_metrics, "loss": Mean(value, jnp.float32(1))}

    return step


def _weights(terms, state, part):
    return [mean.weight for mean in terms(state.params, state.extra, part, None).terms.means]


def averaged(optimizer):
    """Add an average of the updated parameters to the optimizer's state."""

    def update(grads, state, params):
        updates, inner = optimizer.update(grads, state[0], params)
        after = optax.apply_updates(params, updates)
        mean = jax.tree.map(lambda old, now: 0.9 * old + 0.1 * now, state[1], after)
        return updates, (inner, mean)

    return optax.GradientTransformation(
        lambda params: (optimizer.init(params), jax.tree.map(jnp.copy, params)), update
    )


def with_term(params, batch, rng):
    return good(params, batch, rng) + 0.1 * auxiliary(params, batch)


def with_metric(params, batch, rng):
    off = errors(params, batch)
    return good(params, batch, rng), {"off": Mean.of(jnp.sqrt(off), batch["mask"])}


@stateful
def with_statistics(params, extra, batch, rng):
    """Return the loss and a running mean of the heights."""
    mean = Mean.of(height(params, batch), batch["mask"])
    running = Mean(0.9 * extra["mean"] * mean.weight + 0.1 * mean.total, mean.weight)
    return good(params, batch, rng), {}, {"mean": running}


def changed(inner, **members):
    """Return a copy of the strategy with overridden members."""
    other = copy.copy(inner)
    other.__class__ = type("Changed", (type(inner),), members)
    return other


def missing_sum(inner):
    """Return a strategy whose psum is the identity."""
    return changed(inner, psum=property(lambda self: lambda tree: tree))


def first_rows(inner):
    """Return a strategy that gives the first device's rows to all devices."""

    def place(self, batch, *, stacked=False):
        first = {name: array[: len(array) // 4] for name, array in batch.items()}
        return inner.place({n: jnp.concatenate([x] * 4) for n, x in first.items()})

    return changed(inner, place=place)


class Over(NamedTuple):
    """The config of a strategy that is changed after it is built."""

    change: object
    impl: str = "shard_map"

    def build(self):
        return self.change(Mirrored(devices=4, impl=self.impl).build())


def _over(change, name="four devices", impl="shard_map"):
    return {name: Over(change, impl)}


def _fault(
    cause, message, *, step=None, right_step=None, wrong=None, right=None, loss=good, **more
):
    shared = {"loss": loss, "params": line(), "batch": points(8), "optimizer": SGD, **more}
    steps = [{"step": make} if make else {} for make in (step, right_step)]
    strategies = [{"strategies": s} if s else {"strategies": {}} for s in (wrong, right)]
    return Fault(
        {**shared, **steps[0], **strategies[0]},
        {**shared, **steps[1], **strategies[1]},
        cause,
        message,
    )


def _step(name, cause, message, **more):
    return _fault(cause, message, step=handwritten(name), right_step=handwritten(), **more)


PLAIN = _over(lambda inner: inner)
FAULTS = {
    "clip before the reduction": _step("clip", "clip before the sum",
        "clipping, acts on each microbatch", optimizer=CLIPPED),
    "weight decay for each microbatch": _step("decay", "decay per part",
        "weight decay is applied again", optimizer=DECAYED),
    "stale EMA": _step("stale", "state", "opt_state/1", optimizer=averaged(SGD)),
    "loss scale not divided": _step("loss scale", "loss scale", "is 2^10 times"),
    "auxiliary loss for each microbatch": _step("auxiliary", "term by parts",
        "by term 1 of the loss", loss=with_term),
    "key folded with the microbatch": _step("key of the microbatch", "key of the part",
        "the number of a microbatch", loss=dropout),
    "last microbatch overwrites": _step("overwritten", "missing sum", "of the last microbatch"),
    "gradient divided by the padded rows": _step("padded size", "padded size", "5/8"),
    "metric as a mean of means in a step": _step("metric", "metric: mean of means",
        "the metric 'off'", loss=with_metric),
    "running statistics of the last microbatch": _step("last statistics", "statistics of one part",
        "the last microbatch alone", loss=with_statistics, extra={"mean": jnp.float32(0.5)}),
    "dropout from the device's index": _step("key of the device", "key of the part", "axis_index",
        loss=dropout, wrong=PLAIN, right=PLAIN),
    "the sign before the sum": _step("sign", "function before the sum",
        "acts on each microbatch before they are summed"),
    "gradients summed in bfloat16": _step("bfloat16", "rounding",
        "a sum over microbatches or devices in 16 bits"),
    "missing psum": _fault("missing sum", "a psum is missing", wrong=_over(missing_sum),
        right=PLAIN),
    "double psum": _step("double sum", "double sum", "4 times that of one device", wrong=PLAIN,
        right=PLAIN),
    "every device has the rows of the first": _fault("missing sum", "first device alone",
        wrong=_over(first_rows), right=PLAIN),
}  # fmt: skip
