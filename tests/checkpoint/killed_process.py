"""A process that trains and saves until it is killed: DIRECTORY. Not a test itself."""

import os
import sys
from pathlib import Path

os.environ["JAX_PLATFORMS"] = "cpu"

import jax.numpy as jnp

from jtrain.checkpoint import CheckpointManager


def state_of(step: int) -> dict:
    """Return the state of a step, the same in every process."""
    return {"w": jnp.sin(jnp.arange(300_000.0) * step), "step": jnp.int32(step)}


if __name__ == "__main__":
    checkpoints = CheckpointManager(Path(sys.argv[1]), keep=2)
    checkpoints.prepare()
    start = (checkpoints.newest() or 0) + 1
    for step in range(start, start + 10_000):
        checkpoints.save(step, state_of(step), {"step": step})
