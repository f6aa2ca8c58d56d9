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


def main(directory: Path, how: str) -> None:
    """Save a step, and end without `close`."""
    checkpoints = CheckpointManager(directory)
    if how == "hold":
        checkpoints.prepare()
        print("holds it", flush=True)
        time.sleep(600)
    if how == "fork":
        checkpoints.prepare()
        checkpoints.close()
        checkpoints.prepare()
        if os.fork() == 0:
            time.sleep(3)
            os._exit(0)
        print("forked", flush=True)
        time.sleep(600)
    if how == "full":
        size = 100_000
        resource.setrlimit(resource.RLIMIT_FSIZE, (size, size))
    checkpoints.save(1, {"w": jnp.arange(2_000_000.0)}, {})
    if how == "exit":
        sys.exit()
    if how == "raise":
        raise RuntimeError("a mistake of somebody's")


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
