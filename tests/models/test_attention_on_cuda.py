"""A transformer's step as it is lowered for CUDA on a machine without: its kernels and no copy."""

import contextlib
import re

import jax
import jax.export
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jtrain.core.placement import Unplaced
from jtrain.core.state import new_state
from jtrain.core.step import make_step
from jtrain.errors import ConfigError
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
COLLECTIVES = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "collective_permute")


class OnCuda(Unplaced):
    """One device of a platform that is not here."""

    def attend(self, attention, q, k, v, segments=None):
        return attention(q, k, v, segments, platform="cuda")


@pytest.fixture(autouse=True)
def cudnn_version(monkeypatch):
    """The version of a library that only the running program needs; jax asks when it traces."""
    monkeypatch.setattr(KERNELS, "check_cudnn_version", lambda: 91000)


def lowered(devices: int = 1, **options) -> str:
    """Return the StableHLO of a donated step; over several devices, data parallel."""
    sizes = {"vocab": 64, "context": TIME, "layers": LAYERS, "heads": 2, "width": 32}
    model = Transformer(**sizes, **options).build(OnCuda())

    def loss(params, batch, rng):
        inputs, targets, real = inputs_and_targets(batch)
        logits, _ = model.apply(params, {}, inputs, rng=rng, train=True)
        return next_token(logits, targets, real)

    optimizer = optax.adamw(1e-3)
    init = lambda: new_state(model.init(jax.random.key(0))[0], optimizer, jax.random.key(1))
    batch = {
        "tokens": np.zeros((ROWS * devices, TIME + 1), np.int32),
        "row": np.arange(ROWS * devices, dtype=np.int32),
        "mask": np.ones(ROWS * devices, bool),
    }
    psum = (lambda x: jax.lax.psum(x, "data")) if devices > 1 else (lambda x: x)
    step = make_step(loss, optimizer, compute=jnp.bfloat16, psum=psum)
    if devices > 1:
        mesh = jax.make_mesh((devices,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
        specs = jax.P(), jax.P("data")
        step = jax.shard_map(step, mesh=mesh, in_specs=specs, out_specs=jax.P(), check_vma=False)
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


def test_attention_is_cudnns_call_once_a_layer_and_direction(by_cudnn):
    calls = re.findall(CALL, by_cudnn)
    attention = sorted(call for call in calls if "fmha" in call)
    forward = sum("Backward" not in call for call in attention)
    assert (forward, len(attention) - forward) == (LAYERS, LAYERS)
    # No scores of all positions are written: no array of rows, heads, time and time.
    assert f"tensor<{ROWS}x2x{TIME}x{TIME}x" not in by_cudnn
    assert f"tensor<{ROWS}x2x{TIME}x{TIME}x" in lowered(attention="xla")


def test_nothing_else_leaves_the_program(by_cudnn):
    others = {call for call in re.findall(CALL, by_cudnn) if "fmha" not in call}
    assert not {call for call in others if "callback" in call or "Host" in call}, others
    assert not [kind for kind in COLLECTIVES if f"stablehlo.{kind}" in by_cudnn]


def test_the_state_is_updated_in_place(by_cudnn):
    main = next(line for line in by_cudnn.splitlines() if "func.func public @main" in line)
    arguments, _, outputs = main.partition(") -> (")
    float32 = r"tensor<[\dx]*f32>"
    kept = len(re.findall(r"tf.aliasing_output|jax.buffer_donor", arguments))
    assert kept >= len(re.findall(float32, arguments)) > 3 * LAYERS * 4
    assert len(re.findall(float32, outputs)) > 3 * LAYERS * 4


def test_data_parallel_sends_sums_alone():
    found = lowered(8, attention="cudnn")
    kinds = [kind for kind in COLLECTIVES if f"stablehlo.{kind}" in found]
    assert kinds == ["all_reduce"]
    assert "fmha" in found


def test_without_the_library_the_error_says_what_to_install(monkeypatch):
    def missing():
        raise RuntimeError("cuDNN is not detected.")

    monkeypatch.setattr(KERNELS, "check_cudnn_version", missing)
    with pytest.raises(ConfigError, match=r"cuDNN is not detected. Install it .*\[cuda13\]"):
        lowered(attention="cudnn")


def test_deterministic_operations_are_refused_with_what_to_type(monkeypatch):
    monkeypatch.setattr(KERNELS, "check_cudnn_version", lambda: 91000)
    monkeypatch.setenv("XLA_FLAGS", "--xla_gpu_autotune_level=4 --xla_gpu_deterministic_ops=true")
    with pytest.raises(ConfigError, match=r"model\.attention=xla.*xla\.preset=none"):
        lowered(attention="cudnn")
    monkeypatch.setenv("XLA_FLAGS", "--xla_gpu_deterministic_ops=false")
    assert "fmha" in lowered(attention="cudnn")
