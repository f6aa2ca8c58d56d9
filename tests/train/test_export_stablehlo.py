"""The exported function of a run whose `predict` reads what is added to a batch."""

import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file

from jtrain.train import export_stablehlo


def test_a_predict_that_reads_the_mask_is_exported(tmp_path, monkeypatch):
    """As that of images does, whose rows that the mask hides are zeros."""

    def predict(weights, batch):
        (params, _), row = weights, batch["row"]
        return jnp.where(batch["mask"][:, None], batch["x"] @ params["w"], 0) + row[:, None]

    run = types.SimpleNamespace(
        experiment=types.SimpleNamespace(predict=predict),
        config=None,
        step=3,
        params={"w": jnp.arange(6.0).reshape(2, 3)},
        extra={},
        inputs={"x": jax.ShapeDtypeStruct((2,), jnp.float32)},
        outputs=lambda: predict,
    )
    pytest.importorskip("flatbuffers")
    monkeypatch.setattr(export_stablehlo, "load", lambda *args, **named: run)
    found = export_stablehlo.export_stablehlo("run", "newest", tmp_path / "served")
    assert found["inputs"] == {"x": "float32[b,2]"}
    function = jax.export.deserialize(bytearray((tmp_path / "served/model.stablehlo").read_bytes()))
    arrays, x = load_file(tmp_path / "served/weights.safetensors"), np.float32([[1, 0], [0, 1]])
    got = function.call([arrays[name] for name in found["weights"]], {"x": x})
    np.testing.assert_array_equal(got, [[0, 1, 2], [3, 4, 5]])
