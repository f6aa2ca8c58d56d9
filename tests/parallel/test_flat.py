"""All leaves in one message are summed to the bits of each by itself."""

import jax
import jax.numpy as jnp
import numpy as np
from comparison import assert_close
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from jtrain.parallel.strategies.shmap import flat_psum


def test_sums_every_leaf_to_the_same_bits_in_one_message_a_dtype():
    mesh = Mesh(np.array(jax.devices()[:4]), ("data",))
    draw = np.random.default_rng(0)
    tree = {
        "w": draw.normal(size=(4, 3, 5)).astype(np.float32),
        "b": [
            draw.normal(size=(4,)).astype(np.float32),
            np.arange(8, dtype=np.int32).reshape(4, 2),
        ],
        "empty": np.zeros((4, 0), np.float32),
    }
    by = lambda psum: jax.jit(
        jax.shard_map(psum, mesh=mesh, in_specs=P("data"), out_specs=P(), check_vma=False)
    )
    each = by(lambda tree: jax.lax.psum(tree, "data"))(tree)
    flat = by(lambda tree: flat_psum(tree, "data"))
    for a, b in zip(jax.tree.leaves(each), jax.tree.leaves(flat(tree)), strict=True):
        assert (a.shape, a.dtype) == (b.shape, b.dtype)
        assert np.asarray(a).tobytes() == np.asarray(b).tobytes()
    assert_close(flat(tree)["w"], tree["w"].sum(0, keepdims=True), 1e-6)
    assert str(jax.make_jaxpr(flat)(tree)).count("psum") == 2
    assert jax.tree.leaves(by(lambda tree: flat_psum(tree, "data"))({})) == []
    assert jnp.issubdtype(flat(tree)["b"][1].dtype, jnp.integer)
