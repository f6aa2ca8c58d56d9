"""Command line of a process: the words before its verb, as a person typed them."""

import os

LAUNCHER = "JTRAIN_LAUNCHER"  # `jtrain launch --processes 2`, set by it for the processes it starts


def program() -> str:
    """Return the words before the verb: `jtrain`, or `jtrain launch` with its options."""
    return os.environ.get(LAUNCHER) or "jtrain"
