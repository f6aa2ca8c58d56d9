"""The program of a parameter server of one's own loop.

`python -m jtrain.server.pool.push_process 0` starts the first one.
"""

import sys
import threading
from collections.abc import Sequence

import jax
import numpy as np

from jtrain.errors import DONE, FAULT, UserError
from jtrain.server.pool.child import MOST, enter_child
from jtrain.server.pool.values import decode
from jtrain.server.shards.shard import Facts, Shard
from jtrain.server.transport.listener import Listener
from jtrain.server.transport.wire import Message


class PushService:
    """Answers of a server: a part of the parameters, and which pushes it has applied."""

    def __init__(self):
        self._lock = threading.Lock()
        self._shard: Shard | None = None
        self._applied: dict[str, int] = {}  # number of pushes, by author
        self._ended: dict[str, int] = {}  # item up to which all have ended, by coordinator

    def handle(self, request: Message) -> Message:
        """Answer a request; called in a thread of each peer."""
        with self._lock:
            if request.name == "load":
                return self._load(request)
            shard = self._shard
            if shard is None:
                raise RuntimeError("the server holds no parameters")
            match request.name:
                case "pull":
                    return Message("params", {}, shard.pull(0))
                case "push":
                    return self._push(shard, request)
                case "state":
                    return Message("state", {}, shard.state())
                case "updates":
                    return Message("updates", {"updates": shard.version})
        raise ValueError(f"unknown request {request.name!r}")

    def _load(self, request: Message) -> Message:
        if self._shard is None:  # a request that comes again changes nothing
            optimizer = decode(request.fields["optimizer"], [])()
            # None stands for each array.
            leaf = lambda x: x is None
            tree = jax.tree.structure(decode(request.fields["tree"], []), is_leaf=leaf)
            arrays = [np.asarray(array) for array in request.arrays]
            params = tree.unflatten(arrays[: tree.num_leaves])
            state = jax.tree.structure(jax.eval_shape(optimizer.init, params))
            self._shard = Shard(optimizer, params, state.unflatten(arrays[tree.num_leaves :]))
        return Message("loaded")

    def _push(self, shard: Shard, request: Message) -> Message:
        fields = request.fields
        author, sequence = fields["author"], fields["sequence"]
        self._forget(fields["ended"])
        coordinator, _, item = author.rpartition(":")
        ended = coordinator and int(item) <= self._ended.get(coordinator, 0)
        if ended or sequence <= self._applied.get(author, 0):
            return Message("applied", {"again": True})
        facts = Facts(finite=fields["norm"] >= 0, value=0.0, grad_norm=max(fields["norm"], 0.0))
        arrays = [np.asarray(array) for array in request.arrays]
        shard.push_and_apply(shard.version + 1, 0, arrays, facts)
        self._applied[author] = sequence
        return Message("applied", {"again": False})

    def _forget(self, ended: Sequence) -> None:
        """Forget the pushes of functions that have ended: they come from no worker again."""
        if not ended:
            return
        coordinator, low = ended
        for item in range(self._ended.get(coordinator, 0) + 1, low + 1):
            self._applied.pop(f"{coordinator}:{item}", None)
        self._ended[coordinator] = max(low, self._ended.get(coordinator, 0))


def main() -> int:
    """Serve until this process is killed."""
    port, token = enter_child()
    try:
        with Listener(PushService().handle, token=token, most=MOST, port=port):
            threading.Event().wait()
    except UserError as error:
        sys.stderr.write(f"{error}\n")
        return FAULT
    return DONE


if __name__ == "__main__":
    sys.exit(main())
