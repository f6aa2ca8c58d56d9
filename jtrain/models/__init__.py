"""Models as pure functions: flax modules and the adapter that makes a Model of them."""
