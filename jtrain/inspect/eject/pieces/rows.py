"""Rows of a .npz file."""

from pathlib import Path

import numpy as np

from jtrain.inspect.eject.pieces.shuffle import places, shuffled

DATA: str = "digits.npz"
FIELDS: tuple[str, ...] = ("image", "label")

rows = {}


def read_data():
    """Read the training set, which lies beside this file."""
    with np.load(Path(__file__).with_name(DATA)) as file:
        rows.update({name: file[name] for name in FIELDS})


def batch_at(step):
    """Return the rows of a step, from its number alone."""
    chosen = shuffled(step, len(next(iter(rows.values()))))
    return {**{name: array[chosen] for name, array in rows.items()}, **places()}
