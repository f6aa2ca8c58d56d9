"""A step lowered for CUDA, and splash compiled for a TPU, on a machine without them."""

import contextlib
import os
import re
import textwrap

import jax
import jax.export
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from plain_environ import run_python

from jtrain.core.placement import Unplaced
from jtrain.core.state import new_state
from jtrain.core.step import make_step
from jtrain.losses.next_token import inputs_and_targets, next_token
from jtrain.models.transformer import Transformer

KERNELS = pytest.importorskip("jax._src.cudnn.fused_attention_stablehlo")
LAYERS, ROWS, TIME = 3, 4, 32
CALL = r"stablehlo\.custom_call @([\w$.]+)"
# The program is read and not stored, so that its calls may be those of this release alone.
UNSTABLE = [
    jax.export.DisabledSafetyCheck.custom_call(f"__cudnn$fmhaSoftmax{end}")
    for end in ("", "Backward")
]


class OnCuda(Unplaced):
    """One device of a platform that is not here."""

    def attend(self, attention, q, k, v, segments=None):
        return attention(q, k, v, segments, platform="cuda")


@pytest.fixture(autouse=True)
def cudnn_version(monkeypatch):
    """The version of a library that only the running program needs; jax asks when it traces."""
    monkeypatch.setattr(KERNELS, "check_cudnn_version", lambda: 91000)


def lowered(**options) -> str:
    """Return the StableHLO of a donated step."""
    sizes = {"vocab": 64, "context": TIME, "layers": LAYERS, "heads": 2, "width": 32}
    model = Transformer(**sizes, **options).build(OnCuda())

    def loss(params, batch, rng):
        inputs, targets, real = inputs_and_targets(batch)
        logits, _ = model.apply(params, {}, inputs, rng=rng, train=True)
        return next_token(logits, targets, real)

    optimizer = optax.adamw(1e-3)
    init = lambda: new_state(model.init(jax.random.key(0))[0], optimizer, jax.random.key(1))
    batch = {
        "tokens": np.zeros((ROWS, TIME + 1), np.int32),
        "row": np.arange(ROWS, dtype=np.int32),
        "mask": np.ones(ROWS, bool),
    }
    step = make_step(loss, optimizer, compute=jnp.bfloat16)
    jitted = jax.jit(step, donate_argnums=0)
    with promotion():
        export = jax.export.export(jitted, platforms=["cuda"], disabled_checks=UNSTABLE)
        program = export(jax.eval_shape(init), batch)
    return program.mlir_module()


@contextlib.contextmanager
def promotion():
    """Promote as jax does for its own kernels."""
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        yield


@pytest.fixture(scope="module")
def by_cudnn():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(KERNELS, "check_cudnn_version", lambda: 91000)
        return lowered(attention="cudnn")


@pytest.mark.thorough
def test_attention_is_cudnns_call_once_a_layer_and_direction(by_cudnn):
    calls = re.findall(CALL, by_cudnn)
    attention = sorted(call for call in calls if "fmha" in call)
    forward = sum("Backward" not in call for call in attention)
    assert (forward, len(attention) - forward) == (LAYERS, LAYERS)
    # No scores of all positions are written: no array of rows, heads, time and time.
    assert f"tensor<{ROWS}x2x{TIME}x{TIME}x" not in by_cudnn
    assert f"tensor<{ROWS}x2x{TIME}x{TIME}x" in lowered(attention="xla")


@pytest.mark.thorough
def test_the_state_is_updated_in_place(by_cudnn):
    main = next(line for line in by_cudnn.splitlines() if "func.func public @main" in line)
    arguments, _, outputs = main.partition(") -> (")
    float32 = r"tensor<[\dx]*f32>"
    kept = len(re.findall(r"tf.aliasing_output|jax.buffer_donor", arguments))
    assert kept >= len(re.findall(float32, arguments)) > 3 * LAYERS * 4
    assert len(re.findall(float32, outputs)) > 3 * LAYERS * 4


PROGRAM = textwrap.dedent(
    """
    import jax, jax.numpy as jnp
    from jax.experimental import topologies
    from jax.sharding import SingleDeviceSharding
    from jtrain.models.attention import attention

    chip = topologies.get_topology_desc(platform="tpu", topology_name="v5e:2x2").devices[0]
    shape = lambda *s, dtype=jnp.bfloat16: jax.ShapeDtypeStruct(
        s, dtype, sharding=SingleDeviceSharding(chip)
    )

    def temporaries(size, implementation, segmented=False, **options):
        def loss(q, k, v, ids):
            more = {"segments": ids} if segmented else {}
            how = {"implementation": implementation, "platform": "tpu", **more, **options}
            out = attention(q, k, v, **how)
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
    run_python("-c", PROGRAM, env={**os.environ, **waits})
