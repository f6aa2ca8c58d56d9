"""A process that writes checkpoints and ends in some way: DIRECTORY HOW. Not a test itself."""

import os
import resource
import sys
import time
from pathlib import Path

if __name__ == "__main__":
    os.environ["JAX_PLATFORMS"] = "cpu"

import jax.numpy as jnp

from jtrain.checkpoint import CheckpointManager


def state_of(step: int) -> dict:
    """Return the state of a step, the same in every process."""
    return {"w": jnp.sin(jnp.arange(300_000.0) * step), "step": jnp.int32(step)}


def save_until_killed(directory: Path) -> None:
    checkpoints = CheckpointManager(directory, keep=2)
    checkpoints.prepare()
    start = (checkpoints.newest() or 0) + 1
    for step in range(start, start + 10_000):
        checkpoints.save(step, state_of(step), {"step": step})


def main(directory: Path, how: str) -> None:
    """Save a step, and end without `close`."""
    if how == "forever":
        save_until_killed(directory)
    checkpoints = CheckpointManager(directory)
    if how == "hold":
        checkpoints.prepare()
        print("holds it", flush=True)
        time.sleep(600)
    if how == "full":
        size = 100_000
        resource.setrlimit(resource.RLIMIT_FSIZE, (size, size))
    checkpoints.save(1, {"w": jnp.arange(2_000_000.0)}, {})
    if how == "raise":
        raise RuntimeError("a mistake of somebody's")


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
