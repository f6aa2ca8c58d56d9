"""The perceptron against numpy."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from comparison import assert_close

from jtrain.models.mlp import MLP

IMAGES = np.random.default_rng(0).integers(0, 256, (5, 4, 3)).astype(np.uint8)


def built(**values):
    model = MLP(inputs=12, classes=4, **values).build()
    return model, jax.jit(model.init)(jax.random.key(0))[0]


@pytest.mark.parametrize("widths", [(), (16,), (8, 20)], ids=str)
def test_gives_the_logits_of_the_formula(widths):
    model, params = built(widths=widths)
    x = IMAGES.reshape(5, 12).astype(np.float64) / 255
    for i in range(len(widths) + 1):
        kernel = np.asarray(params["layers"][str(i)]["kernel"], np.float64)
        x = x @ (kernel if kernel.shape[0] == x.shape[1] else kernel.T)
        x = np.maximum(x, 0) if i < len(widths) else x
    logits, _ = jax.jit(model.apply)(params, {}, IMAGES)
    assert_close(logits, x, 5e-6)


def test_rows_of_another_size_are_refused():
    model, params = built()
    with pytest.raises(ValueError, match=r"\[5\] hold 5 numbers.*takes 12. Set model.inputs=5\."):
        jax.eval_shape(lambda p: model.apply(p, {}, jnp.zeros((2, 5))), params)


def test_a_size_that_nobody_gave_is_refused():
    with pytest.raises(ValueError, match=r"inputs=0 and classes=3.*model\.inputs and model\.class"):
        MLP(classes=3).build()
