"""Child process: trains as worker INDEX of two, set up by TF_CONFIG. PORT INDEX RESULTS."""

import json
import os
import sys

if __name__ == "__main__":
    port, index = int(sys.argv[1]), int(sys.argv[2])
    workers = [f"127.0.0.1:{port}", f"127.0.0.1:{port + 1}"]
    task = {"type": "worker", "index": index}
    os.environ["TF_CONFIG"] = json.dumps({"cluster": {"worker": workers}, "task": task})
    os.environ["JAX_PLATFORMS"] = "cpu"
    os.environ.pop("XLA_FLAGS", None)

import jax
import numpy as np
from flax import nnx

import jtrain as jt

X = np.random.default_rng(0).normal(size=(48, 6)).astype(np.float32)
Y = X[:, :3].argmax(1)


def fitted() -> jt.Fitted:
    net = nnx.Linear(6, 3, rngs=nnx.Rngs(0))
    return jt.fit(jt.classifier(net), net, (X, Y), "sgd", lr=0.1, batch=16, epochs=2, valid=(X, Y))


if __name__ == "__main__":
    assert jt.join_processes().processes == 2
    assert jt.join_processes().index == index, "again it does nothing"
    result = fitted()
    assert jax.device_count() == 2
    loss = result.evaluate((X, Y))["loss"]
    np.savez(sys.argv[3], loss=loss, predicted=result.predict(X))
