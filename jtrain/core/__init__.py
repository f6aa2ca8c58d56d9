"""What one training step is, from `jax` and `optax` alone: read `step.py` first."""
