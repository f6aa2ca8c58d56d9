"""Losses of any form whose products with chosen leaves become others."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from comparison import assert_close

import jtrain as jt
from jtrain.errors import ConfigError
from jtrain.train.eight_bits import quantize_loss

DRAW = np.random.default_rng(0)
X = DRAW.normal(size=(6, 4)).astype(np.float32)
PARAMS = {
    "layers": DRAW.normal(size=(3, 4, 4)).astype(np.float32),
    "kernel": DRAW.normal(size=(4, 5)).astype(np.float32),
    "scale": np.ones(4, np.float32),
    "experts": DRAW.normal(size=(2, 4, 4)).astype(np.float32),
    "image": DRAW.normal(size=(3, 3, 1, 1)).astype(np.float32),
}


def doubled(x, w, dims):
    """A product whose result tells that it was taken."""
    return 2 * jax.lax.dot_general(x, w, (tuple(dims), ((), ())))


def quantized(function, *products: str, exclude=()):
    return quantize_loss(function, doubled, products=products, exclude=exclude, key="precision")


def plain(p, x):
    return jnp.tanh(x * p["scale"][None]) @ p["kernel"]


def einsum(p, x):
    return jnp.einsum("oi,bi->bo", p["kernel"].astype(jnp.float32).T, x)  # the weight on the left


def rematted(p, x):
    return jax.checkpoint(lambda w, x: jnp.sin(x) @ w)(p["kernel"], x)


def conditional(p, x):
    return jax.lax.cond(x[0, 0] > 10, lambda w: x[:, :2] @ w[:2], lambda w: x @ w, p["kernel"])


@pytest.mark.thorough
@pytest.mark.parametrize("function", [plain, einsum, rematted, conditional])
def test_finds_the_product_wherever_it_is(function):
    assert_close(quantized(function, "kernel")(PARAMS, X), 2 * function(PARAMS, X), 1e-6)
    frozen = lambda p, x: function(jax.lax.stop_gradient(p), x)
    assert_close(quantized(frozen, "kernel")(PARAMS, X), 2 * function(PARAMS, X), 1e-6)
    total = lambda f: lambda p: jnp.sum(jnp.square(f(p, X)))
    got = jax.grad(total(quantized(function, "kernel")))(PARAMS)
    want = jax.grad(total(function))(PARAMS)
    assert_close(got["kernel"], 4 * want["kernel"], 1e-5)


def test_finds_the_products_of_scanned_layers_and_leaves_the_others():
    def scanned(p, x):
        x, _ = jax.lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, p["layers"])
        return x @ p["kernel"]

    want = X
    for layer in PARAMS["layers"]:
        want = np.tanh(2 * want @ layer)
    assert_close(quantized(scanned, "layers")(PARAMS, X), want @ PARAMS["kernel"], 1e-5)
    both = quantized(scanned, "*")(PARAMS, X)
    assert_close(both, 2 * want @ PARAMS["kernel"], 1e-5)
    without = quantized(scanned, "*", exclude=["kernel"])(PARAMS, X)
    assert_close(without, want @ PARAMS["kernel"], 1e-5)


def test_a_function_that_is_called_twice_is_changed_where_the_leaf_is():
    layer = jax.jit(lambda w, x: jnp.tanh(x @ w))
    params = {"first": PARAMS["layers"][0], "second": PARAMS["layers"][1]}
    got = quantized(lambda p, x: layer(p["second"], layer(p["first"], x)), "first")(params, X)
    assert_close(got, np.tanh(np.tanh(2 * X @ params["first"]) @ params["second"]), 1e-5)


@pytest.mark.thorough
def test_a_stateful_loss_and_the_forms_of_its_output_stay():
    def loss(params, extra, batch, rng):
        assert rng is None
        return jt.Mean.of(plain(params, batch["x"]).sum(1), batch["mask"]), {}, extra

    batch = {"x": X, "mask": jnp.ones(6, bool)}
    made = quantized(jt.stateful(loss), "kernel")
    (value, metrics, extra) = made.loss(PARAMS, {"count": jnp.zeros(2)}, batch, None)
    want = loss(PARAMS, {}, batch, None)[0]
    assert isinstance(value, jt.Mean)
    assert_close(value.value(), 2 * want.value(), 1e-6)
    assert (metrics, list(extra)) == ({}, ["count"])
    again = quantize_loss(made, doubled, products=["kernel"], exclude=[], key="evaluate")
    assert_close(again.loss(PARAMS, {}, batch, None)[0].value(), 2 * want.value(), 1e-6)


def everything(p, x):
    y = jnp.einsum("bi,eio->bo", x, p["experts"]) + jnp.einsum("bi,eio->ebo", x, p["experts"])[0]
    image = jax.lax.conv_general_dilated(
        x[None, ..., None], p["image"], (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")
    )
    return plain(p, x + y + image[0, ..., 0])


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("products", "exclude", "message"),
    [
        (
            ["kernel", "scale"],
            [],
            r"products\[1\] is 'scale': no leaf that it matches \(scale\) mul",
        ),
        (["image"], [], r"plain product \(a convolution\).*Nearest that do: .*kernel"),
        (["kernel"], ["ker*"], r"precision.exclude leaves out all that it matches \(kernel\)"),
    ],
)
def test_a_pattern_without_effect_is_refused_with_the_near_ones(products, exclude, message):
    with pytest.raises(ConfigError, match=message):
        quantized(everything, *products, exclude=exclude)(PARAMS, X)
    quantized(everything, "kernel")(PARAMS, X)


def test_products_with_dims_of_a_batch_are_refused():
    batched = lambda p, x: jnp.einsum("ebi,eio->ebo", jnp.stack([x, x]), p["experts"])
    with pytest.raises(ConfigError, match=r"\(a product with dims of a batch\). No leaf does"):
        quantized(batched, "experts")(PARAMS, X)
