"""Places and times, drawn for each step."""

import numpy as np

from jtrain.inspect.eject.pieces.shuffle import BATCH, SEED, places


def read_data():
    """Read nothing: the rows are drawn."""


def batch_at(step):
    """Return places `x` and times `t` in 0 .. 1, from the number of the step alone."""
    x, t = np.random.default_rng([SEED, step]).random((2, BATCH), np.float32)
    return {"x": x, "t": t, **places()}
