"""Random tokens, from which a model learns nothing."""

import numpy as np

from jtrain.inspect.eject.pieces.shuffle import places, shuffled, splitmix

ROWS: int = 4096
KINDS: int = 32000  # of tokens
CONTEXT: int = 2048  # tokens that a row predicts


def read_data():
    """Read nothing: every row is a function of its number."""


def batch_at(step):
    """Return the rows of a step, from its number alone."""
    time = CONTEXT + 1
    lanes = shuffled(step, ROWS)[:, None] * time + np.arange(time)
    state = np.zeros(1, np.uint64)
    for _ in range(3):
        state = splitmix(state)
    bits = splitmix(splitmix(state ^ lanes.ravel().astype(np.uint64)))
    tokens = ((bits >> np.uint64(11)) * 2.0**-53 * KINDS).astype(np.int32)
    return {"tokens": tokens.reshape(lanes.shape), **places()}
