"""Advice on errors in user code: a table of (kind of error, pattern, advice)."""

import re
from collections.abc import Callable
from typing import NamedTuple

from jtrain.errors.user_code.explain import (
    FULL_TRACEBACK,
    ErrorAdvice,
    UserCodeFailure,
    missing_key,
    missing_path,
    numpy_call,
    subscripted_module,
    unfit_shapes,
    unknown_name,
)

CARRY_EXTRA = (
    "Let jt.classifier(model), or another of those helpers, carry it; or write a jt.stateful(loss) "
    "of (params, extra, batch, rng), and start from both that init gives: params, extra = "
    "model.init(key)."
)


class AdviceRule(NamedTuple):
    """Row of the table: an error of this kind whose text has this pattern."""

    kind: str  # of the class, or of one above it; several are joined by |
    pattern: str
    advise: Callable[[UserCodeFailure], ErrorAdvice]


def advise(failure: UserCodeFailure) -> ErrorAdvice:
    """Return the advice of the first row that matches, or how to see the full traceback."""
    kinds = {cls.__name__ for cls in type(failure.error).__mro__}
    text = str(failure.error)
    for row in TABLE:
        if kinds.intersection(row.kind.split("|")) and re.search(row.pattern, text):
            return row.advise(failure)
    return ErrorAdvice(f"{failure.what} failed", FULL_TRACEBACK)


def _rule(kind: str, pattern: str, happened: str, typed: str) -> AdviceRule:
    return AdviceRule(kind, pattern, lambda f: ErrorAdvice(f"{f.what} {happened}", typed))


TABLE = (
    _rule(
        "TracerBoolConversionError",
        "",
        "asks whether a value holds that JAX has not computed yet (`if`, `while`, `and`)",
        "Choose by jnp.where(condition, a, b); call one of two functions by "
        "jax.lax.cond(condition, f, g, x).",
    ),
    _rule(
        "NonConcreteBooleanIndexError",
        "",
        "picks values by a mask, so that their number depends on the mask",
        "Keep the shape: jnp.where(mask, x, 0); or weigh the rows: jt.Mean.of(values, mask).",
    ),
    _rule(
        "TracerIntegerConversionError",
        "",
        "takes a value that JAX has not computed yet for an index, a size or a range",
        "Take sizes from shapes, x.shape[0]; pick by jnp.take(x, i, axis=0).",
    ),
    AdviceRule("TracerArrayConversionError", "", numpy_call),
    _rule(
        "ConcretizationTypeError",
        "",
        "takes a value that JAX has not computed yet for a Python number (float, int, .item())",
        'Print it by jax.debug.print("{}", x); to have it in the history, return it as a '
        'metric: return loss, {"name": jt.Mean.of(values, batch["mask"])}.',
    ),
    _rule(
        "UnexpectedTracerError",
        "",
        "uses a value that was stored while it was traced before (in a list, an attribute)",
        'Return what is needed later as a metric: return loss, {"name": '
        'jt.Mean.of(values, batch["mask"])}.',
    ),
    _rule(
        "ScopeCollectionNotFound|ValueError",
        "collection is empty|Unable to retrieve state|No value for '",
        "uses a model that carries more than parameters (running statistics), without that",
        CARRY_EXTRA,
    ),
    _rule(
        "TypeError",
        "concrete values of integer type",
        "takes a value that JAX has not computed yet for a size",
        "Take sizes from shapes: x.shape[0].",
    ),
    AdviceRule("KeyError", "", missing_key),
    _rule(
        "NameError",
        "axis name",
        "adds up over devices by itself (psum, pmean, axis_index)",
        "Leave that to the step, which does so with what the loss returns for its rows: "
        'jt.Mean.of(values, batch["mask"]).',
    ),
    AdviceRule("NameError|AttributeError", "", unknown_name),
    AdviceRule("TypeError", "object is not subscriptable", subscripted_module),
    _rule(
        "TypeError",
        "(list|tuple) indices must be integers",
        "asks a list for a name",
        'Count, params[0]; or give a dict, {"w": ...}, for what has names.',
    ),
    _rule(
        "TypeError",
        "subdtype of <class 'numpy.integer'>|must be of integer type|must have integer",
        "is given numbers with a fraction where whole numbers count classes or places",
        "Make them whole where the data is made: y.astype(np.int32).",
    ),
    _rule(
        "TypeError",
        "PRNG key type <class 'NoneType'>|PRNG key.*None",
        "draws without a key: `rng` is None in an evaluation, where nothing is to be drawn",
        "Draw where there is one: x = x if rng is None else dropped(x, rng).",
    ),
    _rule(
        "TypeError",
        "must be Tensor, not|expected Tensor",
        "gives torch an array of JAX, and torch would compute no gradient of it",
        "Write it with jax.numpy (jnp) or optax: "
        "optax.softmax_cross_entropy_with_integer_labels for torch's cross_entropy.",
    ),
    AdviceRule("TypeError", "incompatible shapes|contracting dimensions", unfit_shapes),
    AdviceRule(
        "ValueError", "(?i)incompatible shapes|(could not|cannot) be broadcast", unfit_shapes
    ),
    _rule(
        "TypeError",
        "is not a valid JAX (array )?type|Cannot interpret value of type",
        "gives JAX what is no array of numbers",
        "Make it one: jnp.asarray(x), np.asarray(x) of a list, x.numpy() of a torch tensor.",
    ),
    AdviceRule("OSError", "", missing_path),
)
