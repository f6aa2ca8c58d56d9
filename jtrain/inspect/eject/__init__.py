"""A config as one readable file of jax, optax and numpy: see `jtrain.inspect.eject.eject`."""
