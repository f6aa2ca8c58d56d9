"""Exchange of JSON values between all processes of a run."""

import collections
import contextlib
import functools
import json
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils

from jtrain.errors import FAULT, PeerError, UnreachableError, UserError
from jtrain.io.disk_errors import may_pass


def merge_shards(state: Mapping[str, Any]) -> dict[str, Any]:
    """Return JSON in which the mappings `shares` of all processes are merged.

    Without `shares` the JSON is unchanged. With `shares` every process calls this at the same time.
    """
    if jax.process_count() == 1 or "shares" not in state:
        return dict(state)
    states = [each["shares"] for each in all_gather(state)]
    return {**state, "shares": {shard: place for each in states for shard, place in each.items()}}


def broadcast_from_first(make: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """Return the JSON that the first process makes; its UserError is raised in all processes.

    Every process calls this at the same time. Another exception of `make` ends the first process. A
    single process does not start its devices here.
    """
    if not jax.distributed.is_initialized() or jax.process_count() == 1:
        return make()
    barrier()  # `make` may take minutes, and the first all-gather has a limit of 30 s
    found: dict[str, Any] = {}
    raised = None
    if jax.process_index() == 0:
        try:
            found = {"made": make()}
        except UserError as error:
            found, raised = (
                {"error": str(error), "passes": may_pass(error), "code": error.code},
                error,
            )
    found = all_gather(found)[0]
    if "made" in found:
        return found["made"]
    again = found["passes"] or found["code"] == FAULT
    raise raised or (UnreachableError if again else UserError)(found["error"])


def all_gather(value: Any) -> list[Any]:
    """Return the JSON value of each process, in their order.

    Every process calls this at the same time.
    """
    if jax.process_count() == 1:
        return [value]
    _connect()
    text = np.frombuffer(json.dumps(value).encode(), np.uint8)
    sizes = np.asarray(multihost_utils.process_allgather(np.array(len(text))))
    padded = np.zeros(sizes.max(), np.uint8)
    padded[: len(text)] = text
    texts = np.asarray(multihost_utils.process_allgather(padded))  # processes, bytes
    return [
        json.loads(row[:size].tobytes())
        for row, size in zip(texts, sizes.ravel().tolist(), strict=True)
    ]


@functools.cache
def _connect() -> None:
    """Exchange a first array: on CPUs, Gloo writes to the standard output when it connects."""
    with _quiet_output():
        multihost_utils.process_allgather(np.zeros(()))


@contextlib.contextmanager
def _quiet_output() -> Iterator[None]:
    """Drop what C++ code of this process writes to the standard output in the block."""
    with contextlib.ExitStack() as stack:
        with contextlib.suppress(OSError, AttributeError):  # there may be no standard output
            sys.stdout.flush()
            shown = os.dup(1)
            stack.callback(os.close, shown)
            with open(os.devnull, "wb") as nowhere:
                os.dup2(nowhere.fileno(), 1)
            stack.callback(os.dup2, shown, 1)
        yield


def barrier() -> None:
    """Return once every process has called this."""
    all_gather(None)


def check_equal(facts: Mapping[str, str], when: str) -> None:
    """Raise unless processes that know a fact of the same name agree on it; all call this.

    Raises:
        PeerError: in all processes, with the first fact that differs, and its value in each.
    """
    gathered = all_gather(dict(facts))
    for name in dict.fromkeys(name for each in gathered for name in each):
        values = {process: each[name] for process, each in enumerate(gathered) if name in each}
        [(usual, _)] = collections.Counter(values.values()).most_common(1)
        for process, other in values.items():
            if other != usual:
                raise PeerError(
                    f"{when} the processes of this run have diverged: {name} is {other} in "
                    f"process {process}, and {usual} in "
                    f"{sum(x == usual for x in values.values())} of {len(values)}. Nothing of this "
                    f"step was saved; run again to resume from the newest checkpoint, without the "
                    f"host of process {process} if it is named again."
                )
