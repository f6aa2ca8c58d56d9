"""Where a run goes on: the newest checkpoint of which every byte is what was sealed."""

from pathlib import Path

import jax
import numpy as np
from jax.experimental import multihost_utils

from jtrain.checkpoint import folder

_NONE = -1


def newest_whole(directory: Path) -> tuple[int | None, list[str]]:
    """That step, and a line for each newer one that was damaged and set aside.

    The first process reads and renames; the others are told, and have no lines.
    """
    step, news = _search(directory) if jax.process_index() == 0 else (None, [])
    if jax.process_count() > 1:
        told = multihost_utils.broadcast_one_to_all(np.int32(_NONE if step is None else step))
        step = None if int(told) == _NONE else int(told)
    return step, news


def _search(directory: Path) -> tuple[int | None, list[str]]:
    news = []
    for step in reversed(folder.named(directory)):
        found = folder.faults(directory, step, full=True)
        if not found:
            return step, news
        more = f" (and {len(found) - 1} more)" if len(found) > 1 else ""
        place = folder.set_aside(directory, step)
        news.append(f"checkpoint {step} is damaged and was set aside as {place}: {found[0]}{more}")
    return None, news
