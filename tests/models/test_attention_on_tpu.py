"""Splash attention compiled for a TPU that is not here, by the real compiler (libtpu)."""

import os
import subprocess
import sys
import textwrap

import pytest

PROGRAM = textwrap.dedent(
    """
    import jax, jax.numpy as jnp
    from jax.experimental import topologies
    from jax.sharding import SingleDeviceSharding
    from jtrain.models.attention.attention import attention

    chip = topologies.get_topology_desc(platform="tpu", topology_name="v5e:2x2").devices[0]
    shape = lambda *s, dtype=jnp.bfloat16: jax.ShapeDtypeStruct(
        s, dtype, sharding=SingleDeviceSharding(chip)
    )

    def temporaries(size, implementation, segmented=False, **options):
        def loss(q, k, v, ids):
            more = {"segments": ids} if segmented else {}
            out = attention(
                q, k, v, implementation=implementation, platform="tpu", **more, **options
            )
            return jnp.square(out.astype(jnp.float32)).sum()

        shared = shape(4, 2048, 2, size)
        ids = shape(4, 2048, dtype=jnp.int32)
        program = jax.jit(jax.grad(loss, (0, 1, 2)))
        compiled = program.lower(shape(4, 2048, 8, size), shared, shared, ids).compile()
        assert ("tpu_custom_call" in compiled.as_text()) == (implementation == "splash")
        return compiled.memory_analysis().temp_size_in_bytes

    least = temporaries(128, "xla")
    assert temporaries(128, "splash") < 0.2 * least, (temporaries(128, "splash"), least)
    assert temporaries(64, "splash", window=500, soft_cap=50.0) < 0.2 * least
    assert temporaries(128, "splash", segmented=True) < 0.2 * least
    """
)


@pytest.mark.slow
def test_splash_compiles_for_a_tpu_in_a_fifth_of_the_memory():
    pytest.importorskip("libtpu", reason="pip install libtpu, where there is a wheel of it")
    waits = {"TPU_SKIP_MDS_QUERY": "1", "ALLOW_MULTIPLE_LIBTPU_LOAD": "1", "JAX_PLATFORMS": "cpu"}
    ran = subprocess.run(
        [sys.executable, "-c", PROGRAM],
        env={**os.environ, **waits},
        stderr=subprocess.PIPE,
        text=True,
    )
    assert ran.returncode == 0, ran.stderr
