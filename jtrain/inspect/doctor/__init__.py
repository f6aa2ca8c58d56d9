"""Doctor: checks of the machine; none needs JAX, or any other package, to be importable."""
