"""Labels in 8 bits, of more classes than these hold, have the losses of int32."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from comparison import assert_close

from jtrain.losses import accuracy, chunked_next_token, confusion, cross_entropy

ROWS, CLASSES, WIDTH = 6, 300, 4
LOGITS = jax.random.normal(jax.random.key(0), (ROWS, CLASSES))
HIDDEN = jax.random.normal(jax.random.key(1), (2, 3, WIDTH))
HEAD = jax.random.normal(jax.random.key(2), (CLASSES, WIDTH))
MASK = jnp.ones(ROWS, bool)


def first(output: Any) -> Any:
    mean, metrics = output if isinstance(output, tuple) else (output, {})
    return mean.total / mean.weight, {name: each.total for name, each in metrics.items()}


CASES: dict[str, Callable[[Any, Any], Any]] = {
    "cross entropy": lambda logits, labels: cross_entropy(logits, labels, MASK),
    "top 3": lambda logits, labels: accuracy(logits, labels, MASK, top=3),
    "confusion": lambda logits, labels: confusion(logits, labels, MASK),
    "in chunks": lambda logits, labels: chunked_next_token(
        HIDDEN + logits[:2, :3, None], HEAD, labels.reshape(2, 3), MASK.reshape(2, 3)
    ),
}


@pytest.mark.parametrize("dtype", [np.uint8, np.int8])
@pytest.mark.parametrize("name", CASES)
def test_is_that_of_int32(name: str, dtype: type):
    labels = np.array([3, 10, 44, 100, 120, 127 if dtype == np.int8 else 200])

    def of(kind: type) -> Any:
        given = jnp.asarray(labels.astype(kind))

        def loss(logits: Any) -> Any:
            value, metrics = first(CASES[name](logits, given))
            return value.sum(), (value, metrics)

        return jax.jit(jax.grad(loss, has_aux=True))(LOGITS)

    grad, (value, metrics) = of(np.int32)
    narrow_grad, (narrow, others) = of(dtype)
    assert_close(narrow, value, within=1e-6)
    assert_close(narrow_grad, grad, within=1e-6)
    for metric, total in metrics.items():
        assert_close(others[metric], total, within=1e-6)
