"""Optimizers of optax by their names."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from comparison import assert_close
from pydantic import TypeAdapter, ValidationError

from jtrain.optim import Optax, Optimizer, ParamGroup

PARAMS = {"kernel": jnp.arange(6.0).reshape(2, 3) / 6, "bias": jnp.ones(3)}
MADE = {
    "rmsprop": (lambda rate: optax.rmsprop(rate, momentum=0.9), {"momentum": 0.9}),
    "contrib.prodigy": (optax.contrib.prodigy, {}),
    "contrib.momo": (optax.contrib.momo, {}),  # takes the value of the loss
}


def walk(optimizer: optax.GradientTransformation, steps: int = 4) -> dict[str, np.ndarray]:
    loss = lambda p: sum(((x - 0.3) ** 2).sum() for x in jax.tree.leaves(p))
    update = optax.with_extra_args_support(optimizer).update
    params, state = PARAMS, optimizer.init(PARAMS)
    for _ in range(steps):
        value, grads = jax.value_and_grad(loss)(params)
        updates, state = update(grads, state, params, value=value, grad=grads)
        params = optax.apply_updates(params, updates)
    return jax.device_get(params)


@pytest.mark.parametrize("name", MADE)
def test_takes_the_steps_of_optax(name: str):
    make, args = MADE[name]
    schedule = {"kind": "linear", "warmup": 2}
    values = Optax(lr=0.1, name=name, args=args, schedule=schedule)  # pyright: ignore
    expected = walk(make(values.learning_rate(8)))
    jax.tree.map(np.testing.assert_array_equal, walk(values.build(8)), expected)


def test_groups_scale_and_freeze_it():
    plain = walk(Optax(lr=0.1, name="rmsprop").build(1), 1)
    groups = (ParamGroup(match="bias", freeze=True), ParamGroup(match="kernel", lr_factor=0.5))
    found = walk(Optax(lr=0.1, name="rmsprop", groups=groups).build(1), 1)
    np.testing.assert_array_equal(found["bias"], PARAMS["bias"])
    moved = lambda params: params["kernel"] - PARAMS["kernel"]
    assert_close(moved(found), 0.5 * moved(plain), 1e-6)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"name": "adamw", "weight_decay": 0.1}, "optimizer.args={weight_decay: 0.1}"),
        ({"name": "contrib.schedule_free_sgd"}, "write optimizer.kind=schedule_free"),
    ],
)
def test_what_it_cannot_take_is_refused_with_what_to_type(values, message: str):
    with pytest.raises(ValidationError, match=message):
        TypeAdapter(Optimizer).validate_python({"kind": "optax", "lr": 0.1, **values})
