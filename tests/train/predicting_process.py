"""One of two processes with two devices each: PORT INDEX RESULTS. Not a test itself."""

import os
import sys

if __name__ == "__main__":
    os.environ["JAX_PLATFORMS"] = "cpu"
    os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=2"

import jax
import numpy as np

import jtrain as jt
import jtrain.errors
from jtrain.losses.cross_entropy import cross_entropy
from jtrain.train.hooks import on_state

X = np.random.default_rng(0).normal(size=(45, 3)).astype(np.float32)
W = {"w": np.array([1, -2, 3], np.float32), "offset": np.float32(0.5)}


def apply(params, batch):
    height = batch["x"] @ params["w"] + params["offset"]
    return {"height": height, "square": batch["x"] ** 2, "row": batch["row"]}


def loss(params, batch, rng):
    return jt.Mean.of(apply(params, batch)["height"] ** 2, batch["mask"])


def classify(params, batch, rng):
    """Compute a loss that ignores a label -1."""
    logits = apply(params, batch)["height"][:, None] * jax.numpy.arange(3.0)[None]
    known = batch["mask"] & (batch["label"] >= 0)
    return cross_entropy(logits, batch["label"], known)


def refused(label: int) -> str:
    """Return the error for a label that only the second process reads."""
    labels = np.where(np.arange(16) == 13, label, 0).astype(np.int32)
    try:
        jt.evaluate(classify, W, {"x": X[:16], "label": labels}, batch=16)
    except jt.errors.DataError as error:
        return str(error)
    return ""


def hooked(index: int) -> np.ndarray:
    """Train with a hook of the first process alone; return the steps at which it was called."""
    seen, x = [], np.random.default_rng(0).standard_normal((64, 4)).astype(np.float32)
    loss = lambda params, batch, rng: jt.Mean.of((batch["x"] @ params["w"]) ** 2, batch["mask"])
    hooks = [] if index else [on_state(lambda step, state: seen.append(step), every=7)]
    params = {"w": np.ones(4, np.float32)}
    result = jt.fit(loss, params, {"x": x}, steps=25, lr=1e-2, batch=16, hooks=hooks, quiet=True)
    assert result.step == 25
    return np.array(seen)


def main(port: str, index: int, results: str) -> None:
    """Predict, evaluate, and train with a hook of the first process."""
    where = f"127.0.0.1:{port}"
    jax.distributed.initialize(where, 2, index, coordinator_bind_address=where)
    out = {}
    for parallel in ("mirrored", "fsdp"):
        found = jt.predict(apply, W, X, batch=16, parallel=parallel)  # 45 rows: the last are 13
        out |= {f"{parallel}/{name}": array for name, array in found.items()}
    out["loss"] = np.float64(jt.evaluate(loss, W, X, batch=16)["loss"])
    out |= {"counted": np.array(refused(7)), "left_out": np.array(refused(-1))}
    np.savez(results, hooked=hooked(index), **out)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), sys.argv[3])
