"""The environment of programs that tests start as a person would."""

import os


def plain_environ() -> dict[str, str]:
    """Return the variables without the flags of conftest.py: one CPU device, and quick programs."""
    return {name: value for name, value in os.environ.items() if name != "XLA_FLAGS"}
