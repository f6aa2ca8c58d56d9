"""One run, from its config to its result."""
