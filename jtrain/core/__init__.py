"""One training step, made of `jax` and `optax` alone: read `step.py` first, then `gradient.py`."""
