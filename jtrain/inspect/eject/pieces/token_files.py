"""Windows over the files of `jtrain data prepare`."""

import numpy as np

from jtrain.inspect.eject.pieces.shuffle import places, shuffled

PATHS: tuple[str, ...] = ("tokens/00000.bin",)
DTYPE: str = "<u2"
BEGIN: int = 0  # of the tokens that are trained on
END: int = 1000
CONTEXT: int = 1024  # tokens that a row predicts

rows = {}


def read_data():
    """Map the files of tokens; several are read into memory as one."""
    files = [np.memmap(path, DTYPE, "r") for path in PATHS]
    tokens = files[0] if len(files) == 1 else np.concatenate(files)
    rows["tokens"] = tokens[BEGIN:END]


def batch_at(step):
    """Return the rows of a step, from its number alone; a row begins anywhere in the text."""
    starts = shuffled(step, len(rows["tokens"]) - CONTEXT)
    windows = rows["tokens"][starts[:, None] + np.arange(CONTEXT + 1)]
    return {"tokens": windows.astype(np.int32), **places()}
