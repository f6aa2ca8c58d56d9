"""Sequences split over devices: by a ring or by Ulysses, attention is that of one device."""

import functools
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from comparison import distance

from jtrain.core.rows import row_keys
from jtrain.losses.next_token import inputs_and_targets, next_token, segments_of
from jtrain.models.transformer import Transformer
from jtrain.parallel import Axes, Single, Strategy

ROWS, TIME, VOCABULARY = 8, 32, 64
# Rounding of sums in another order, in float32; gradients of these cases are off by 2.4e-7 at most.
NEAR = 1e-6


def batch(packed: bool) -> dict[str, np.ndarray]:
    draw = np.random.default_rng(1)
    tokens = draw.integers(0, VOCABULARY, (ROWS, TIME + 1)).astype(np.int32)
    given = {"tokens": tokens, "row": np.arange(ROWS, dtype=np.int32), "mask": np.ones(ROWS, bool)}
    if packed:  # up to five segments a row and some padding
        ids = np.sort(draw.integers(0, 6, (ROWS, TIME + 1)), axis=1)[:, ::-1]
        return {**given, "segments": np.ascontiguousarray(ids, np.int32)}
    return {**given, "length": draw.integers(4, TIME + 1, ROWS).astype(np.int32)}


class Case(NamedTuple):
    """A transformer, and how it is laid out."""

    axes: dict[str, Any]
    values: Mapping[str, Any] = MappingProxyType({})
    packed: bool = False

    def __str__(self) -> str:
        said = {
            **self.axes,
            **{k: v["kind"] if isinstance(v, dict) else v for k, v in self.values.items()},
        }
        return "-".join(f"{k} {v}" for k, v in said.items()) + ("-packed" if self.packed else "")


ROTARY = {"positions": {"kind": "rotary"}}
ULYSSES = {"context_by": "ulysses"}
EXPERTS: dict[str, Any] = {"count": 4, "top_k": 2}
QUICK = [
    Case({"context": 4, "data": 2}, {**ROTARY, "kv_heads": 2, "window": 9}, packed=True),
    Case({"context": 2, "fsdp": 2, "tensor": 2}, {"dropout": 0.2}),
    Case({"context": 2, "tensor": 2, "data": 2, **ULYSSES}, {**ROTARY, "window": 9}, packed=True),
]
SLOW = [
    Case({"context": 4, "expert": 2}, {**ROTARY, "experts": {**EXPERTS, "kind": "capacity"}}),
    Case({"context": 2, "expert": 2, "data": 2}, {"experts": {**EXPERTS, "kind": "dropless"}}),
    Case({"context": 2, "fsdp": 4, "sequence": True}, {**ROTARY, "kv_heads": 1, "tied": False}),
    Case({"context": 2, "tensor": 4, "sequence": True}, {"window": 5}),
    Case(
        {"context": 4, "tensor": 2}, {**ROTARY, "kv_heads": 2, "attention_cap": 5.0, "scan": True}
    ),
    Case({"context": 8}, {**ROTARY, "window": 3}, packed=True),
    Case({"context": 8}, {"window": 9, "global_every": 2}),
    Case({"context": 4, "data": 2}, {"remat": "full", "scan": True}, packed=True),
    Case({"context": 4, "fsdp": 2}, {**ROTARY, "remat": "names", "saved": ("attention",)}),
    Case(
        {"context": 2, "fsdp": 2, "tensor": 2, "zero": 1}, {**ROTARY, "qk_norm": True}, packed=True
    ),
    Case({"context": 4, "fsdp": 2, **ULYSSES}, {"attention_cap": 5.0, "dropout": 0.2}),
    Case({"context": 2, "fsdp": 4, **ULYSSES}, {**ROTARY, "kv_heads": 2, "tied": False}),
    Case({"context": 2, "tensor": 2, "data": 2, **ULYSSES}, {"scan": True, "remat": "full"}),
]
CASES = [
    *(pytest.param(case, id=str(case), marks=pytest.mark.thorough) for case in QUICK[:-1]),
    pytest.param(QUICK[-1], id=str(QUICK[-1])),
    *(pytest.param(case, id=str(case), marks=pytest.mark.slow) for case in SLOW),
]


def values_of(case: Case) -> Transformer:
    small = {"vocab": VOCABULARY, "context": TIME, "layers": 1, "heads": 4, "width": 32}
    layers = {"layers": 2} if {"scan", "global_every"} & set(case.values) else {}
    return Transformer(**{**small, **layers, **case.values})


def slope(where: Strategy, case: Case) -> tuple[Any, Any]:
    """Return the loss and its gradient, on the host."""
    values = values_of(case)
    model = values.build(where.placement)

    def loss(params, batch):
        params = laid(params)
        inputs, targets, real = inputs_and_targets(batch)
        keys = row_keys(jax.random.key(7), batch) if values.dropout else None
        options = {"segments": segments_of(batch), "rng": keys, "train": True}
        mean, _ = next_token(model.apply(params, {}, inputs, **options)[0], targets, real)
        value = mean.total / mean.weight
        logits = model.routed(params, {}, inputs, **options)[0][1]  # b l t e
        if logits is None:
            return value
        # Each position with a weight of its own.
        late = jnp.arange(TIME, dtype=jnp.float32)[None, None, :, None] / TIME
        return value + 1e-3 * jnp.mean(late * jnp.square(logits))

    init = lambda: model.init(jax.random.key(0))[0]
    like = jax.eval_shape(init)
    lies, laid = where.shardings(like, model.dims), where.gradient_sharding(like, model.dims).params
    params = jax.device_put(jax.jit(init)(), lies)
    return jax.device_get(
        jax.jit(jax.value_and_grad(loss))(params, where.place(batch(case.packed)))
    )


@functools.cache
def on_one(case: str) -> tuple[Any, Any]:
    return slope(Single().build(), next(c for c in QUICK + SLOW if str(c) == case))


@pytest.mark.parametrize("case", CASES)
def test_loss_and_gradient_are_those_of_one_device(case: Case, capfd: pytest.CaptureFixture):
    axes = Axes(**{"fsdp": 1, "min_size": 0, **case.axes})
    loss, grads = slope(axes.build(), case)
    assert "rematerialization" not in capfd.readouterr().err
    wanted, exact = on_one(str(case))
    print(f"{case}: loss {abs(loss / wanted - 1):.1e}, gradient {distance(grads, exact):.1e}")
    assert abs(loss / wanted - 1) < NEAR
    assert distance(grads, exact) < NEAR
