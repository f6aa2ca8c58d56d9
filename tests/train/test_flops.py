"""The work of a function is counted by its products, as often as they run."""

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax.extend.core import Primitive

from jtrain.train.flops import count_flops

A, B = jnp.zeros((3, 4)), jnp.zeros((4, 5))
IMAGE, KERNEL = jnp.zeros((2, 8, 8, 6)), jnp.zeros((3, 3, 3, 10))
NHWC = ("NHWC", "HWIO", "NHWC")


def convolve(x, kernel, stride=1):
    return lax.conv_general_dilated(
        x, kernel, (stride, stride), "VALID", dimension_numbers=NHWC, feature_group_count=2
    )


def layers(x, kernels, *, unroll):
    body = lambda x, kernel: (jnp.tanh(x @ kernel), None)
    return lax.scan(body, x, kernels, unroll=unroll)[0].sum()


def test_a_matrix_product_is_two_operations_for_each_pair():
    assert count_flops(jnp.matmul, A, B) == 2 * 3 * 4 * 5
    batched = lambda a, b: jnp.einsum("nij,njk->nik", a, b)
    assert count_flops(batched, jnp.zeros((7, 3, 4)), jnp.zeros((7, 4, 5))) == 7 * 2 * 3 * 4 * 5
    assert count_flops(jnp.tanh, A) == 0


def test_a_convolution_counts_the_taps_of_its_group():
    assert count_flops(convolve, IMAGE, KERNEL) == 2 * (2 * 6 * 6 * 10) * (3 * 3 * 3)


def test_a_ragged_product_is_that_of_each_row_with_its_own_kernel():
    rows, kernels, sizes = jnp.zeros((8, 4)), jnp.zeros((3, 4, 5)), jnp.array([1, 0, 7])
    product = lambda rows, kernels: lax.ragged_dot(rows, kernels, sizes)
    assert count_flops(product, rows, kernels) == 2 * 8 * 4 * 5
    both = jax.grad(lambda *x: jnp.square(product(*x)).sum(), (0, 1))
    assert count_flops(both, rows, kernels) == 3 * 2 * 8 * 4 * 5


def test_zeros_of_a_strided_gradient_are_not_counted():
    of = lambda stride: count_flops(
        jax.grad(lambda x, k: convolve(x, k, stride).sum(), (0, 1)), IMAGE, KERNEL
    )
    assert of(2) < of(1) / 2


@pytest.mark.parametrize("fn", [lambda f: f, jax.grad], ids=["value", "gradient"])
def test_a_scan_counts_as_often_as_it_runs(fn):
    x, kernels = jnp.zeros((16, 32)), jnp.zeros((6, 32, 32))
    looped = count_flops(fn(lambda k: layers(x, k, unroll=1)), kernels)
    # XLA counts the products of what is written out, and the few operations between them.
    lowered = jax.jit(fn(lambda k: layers(x, k, unroll=True))).lower(kernels)
    assert looped == pytest.approx(lowered.cost_analysis()["flops"], rel=0.1)


def test_what_is_computed_again_counts_again():
    loss = lambda f: lambda a: f(lambda a: jnp.tanh(jnp.tanh(a @ B) @ B.T))(a).sum()
    once, twice = (count_flops(jax.grad(loss(f)), A) for f in (lambda g: g, jax.checkpoint))
    assert once is not None
    assert twice is not None
    assert once < twice <= 1.5 * once


def test_the_most_expensive_branch_counts():
    choose = lambda p, a: lax.cond(p, lambda a: a @ B, lambda a: jnp.tanh(a[:, :1] @ B[:1]), a)
    assert count_flops(choose, True, A) == 2 * 3 * 4 * 5


def test_a_loop_without_a_count_is_not_known_unless_it_multiplies_nothing():
    until = lambda f: lambda a: lax.while_loop(lambda a: a.sum() < 1, f, a)
    assert count_flops(until(lambda a: a @ B @ B.T), A) is None
    assert count_flops(until(lambda a: a + 1), A) == 0


def test_a_lower_bound_counts_one_turn_of_such_a_loop():
    until = lambda f: lambda a: lax.while_loop(lambda a: a.sum() < 1, f, a)
    turn = 2 * 3 * 4 * 5 + 2 * 3 * 5 * 4
    assert count_flops(until(lambda a: a @ B @ B.T), A, lower_bound=True) == turn
    assert count_flops(lambda a: until(lambda a: a @ B @ B.T)(a) @ B, A, lower_bound=True) == (
        turn + 2 * 3 * 4 * 5
    )


def test_shapes_are_enough():
    shapes = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in (A, B)]
    assert count_flops(jnp.matmul, *shapes) == 2 * 3 * 4 * 5


def test_parts_on_several_devices_add_up():
    mesh = jax.make_mesh((4,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    spec = jax.sharding.PartitionSpec("data")
    split = jax.shard_map(lambda a: a @ B, mesh=mesh, in_specs=spec, out_specs=spec)
    assert count_flops(split, jnp.zeros((8, 4))) == 2 * 8 * 4 * 5


def kernel(name, count):
    primitive = Primitive(name)
    primitive.def_abstract_eval(lambda x, *_, **params: x)
    return lambda *arrays, **params: primitive.bind(*arrays[:count], **params)


def test_attention_by_cudnn_counts_each_query_and_key():  # a GPU is needed to trace cuDNN's own
    q, kv = jnp.zeros((2, 6, 4, 8)), jnp.zeros((2, 5, 4, 8))  # b t h k
    product = 2 * 2 * 4 * 6 * 5 * 8
    for name, products in {"fwd": 2, "bwd": 5}.items():
        attend = kernel(f"dot_product_attention_{name}_wrapper", 3)
        assert count_flops(lambda *x, f=attend: f(*x, layout=0), q, kv, kv) == products * product


@pytest.mark.parametrize("name", ["dot_product_attention_fp8_fwd", "ffi_call", "pallas_call"])
def test_another_kernel_is_not_known(name):
    run = kernel(name, 1)
    assert count_flops(lambda x: run(x) @ B, A) is None
