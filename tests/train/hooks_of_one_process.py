"""One of two processes, the first of which alone has a hook: PORT INDEX. Not a test itself."""

import os
import sys

if __name__ == "__main__":
    os.environ["JAX_PLATFORMS"] = "cpu"

import jax
import numpy as np

import jtrain as jt
from jtrain.train.hooks import on_state


def main(port: str, index: str) -> None:
    """Train a linear map, whose state the first process reads each 7 steps."""
    address = f"127.0.0.1:{port}"
    jax.distributed.initialize(
        address, num_processes=2, process_id=int(index), coordinator_bind_address=address
    )
    x = np.random.default_rng(0).standard_normal((64, 4)).astype(np.float32)
    loss = lambda params, batch, rng: jt.Mean.of(
        (batch["x"] @ params["w"] - batch["y"]) ** 2, batch["mask"]
    )
    seen = []
    hooks = [] if int(index) else [on_state(lambda step, state: seen.append(step), every=7)]
    params, data = {"w": np.zeros(4, np.float32)}, {"x": x, "y": x.sum(1)}
    result = jt.fit(loss, params, data, steps=40, lr=1e-2, batch=16, hooks=hooks)
    assert result.step == 40
    assert seen == ([] if int(index) else [7, 14, 21, 28, 35])


if __name__ == "__main__":
    main(*sys.argv[1:])
