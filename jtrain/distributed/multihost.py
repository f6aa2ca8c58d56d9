"""What all processes of a run have, known to each of them."""

import json
from collections.abc import Callable, Mapping
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils

from jtrain.errors import PeerError


def merge_shards(state: Mapping[str, Any]) -> dict[str, Any]:
    """JSON in which the mappings `shares` of all processes are one; without them it is unchanged.

    Where there is one every process calls this at the same time.
    """
    if jax.process_count() == 1 or "shares" not in state:
        return dict(state)
    every = [each["shares"] for each in all_gather(state)]
    return {**state, "shares": {part: place for each in every for part, place in each.items()}}


def broadcast_from_first(make: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """What the first process makes, JSON, told to all; what it raises there ends it there.

    Where there is one every process calls this at the same time.
    """
    if jax.process_count() == 1:
        return make()
    barrier()  # what it makes may take minutes, and the first meeting of all has 30 s
    return all_gather(make() if jax.process_index() == 0 else {})[0]


def all_gather(value: Any) -> list[Any]:
    """The value of each process, JSON, in their order.

    Where there is one every process calls this at the same time.
    """
    if jax.process_count() == 1:
        return [value]
    text = np.frombuffer(json.dumps(value).encode(), np.uint8)
    sizes = np.asarray(multihost_utils.process_allgather(np.array(len(text))))
    padded = np.zeros(sizes.max(), np.uint8)
    padded[: len(text)] = text
    texts = np.asarray(multihost_utils.process_allgather(padded))  # processes, bytes
    return [
        json.loads(one[:size].tobytes())
        for one, size in zip(texts, sizes.ravel().tolist(), strict=True)
    ]


def barrier() -> None:
    """Returns when every process is here."""
    all_gather(None)


def check_equal(facts: Mapping[str, str], when: str) -> None:
    """Makes sure that processes that know a fact by the same name know the same; all call this.

    Raises:
        PeerError: in all of them, with the first fact that they do not, and who says what.
    """
    every = all_gather(dict(facts))
    for name in dict.fromkeys(name for each in every for name in each):
        said = {process: each[name] for process, each in enumerate(every) if name in each}
        usual = max(said.values(), key=list(said.values()).count)
        for process, other in said.items():
            if other != usual:
                raise PeerError(
                    f"{when} the processes of this run have come apart: {name} is {other} in "
                    f"process {process}, and {usual} in "
                    f"{sum(x == usual for x in said.values())} of {len(said)}. Nothing of it was "
                    f"saved; run again to go on from the newest checkpoint, without the host of "
                    f"process {process} if it is named again."
                )
