"""Windows over a text in a .npz file."""

from pathlib import Path

import numpy as np

from jtrain.inspect.eject.pieces.shuffle import places, shuffled

DATA: str = "shakespeare.npz"
CONTEXT: int = 64  # tokens that a row predicts

rows = {}


def read_data():
    """Read the tokens of the training text, which lie beside this file."""
    with np.load(Path(__file__).with_name(DATA)) as file:
        rows["tokens"] = file["tokens"]


def batch_at(step):
    """Return the rows of a step, from its number alone; a row begins anywhere in the text."""
    starts = shuffled(step, len(rows["tokens"]) - CONTEXT)
    windows = rows["tokens"][starts[:, None] + np.arange(CONTEXT + 1)]
    return {"tokens": windows.astype(np.int32), **places()}
