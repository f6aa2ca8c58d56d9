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


def main(port: str, index: int, results: str) -> None:
    """Predict, evaluate, and train for a time that the first process measures."""
    where = f"127.0.0.1:{port}"
    jax.distributed.initialize(where, 2, index, coordinator_bind_address=where)
    out = {}
    for parallel in ("mirrored", "fsdp"):
        found = jt.predict(apply, W, X, batch=16, parallel=parallel)  # 45 rows: the last are 13
        out |= {f"{parallel}/{name}": array for name, array in found.items()}
    out["loss"] = np.float64(jt.evaluate(loss, W, X, batch=16)["loss"])
    out |= {"counted": np.array(refused(7)), "left_out": np.array(refused(-1))}
    timed = jt.fit(loss, W, {"x": X}, steps="0.02 seconds", batch=16, lr=1e-3, quiet=True)
    np.savez(results, steps=timed.step, **out)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), sys.argv[3])
