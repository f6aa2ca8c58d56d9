"""Service of a shard: requests of workers and of the coordinator, one at a time."""

import threading
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from jtrain.server.server_plan import Plan
from jtrain.server.shard import Facts, Shard
from jtrain.server.wire import Message


class ShardService:
    """Answers of a shard; workers wait until it is loaded."""

    def __init__(self, plan: Plan, index: int):
        self._plan, self._index = plan, index
        self.traffic: Callable[[], tuple[int, int]] = lambda: (0, 0)
        """Gives the bytes received and sent so far."""
        self._lock = threading.Lock()
        self._loaded = threading.Event()
        self._shard: Shard | None = None
        like = plan.setup.like.params, plan.shard_opt_state
        self._tree = jax.tree.structure(like)

    def handle(self, request: Message) -> Message:
        """Answer a request; called in a thread of each peer."""
        if request.name == "load":
            with self._lock:
                self._load(request)
            return Message("loaded")
        if not self._loaded.wait(self._plan.server.timeout / 2):
            raise TimeoutError("the server holds no parameters yet")
        with self._lock:
            return self._answer(request)

    def _load(self, request: Message) -> None:
        params, opt_state = self._tree.unflatten(request.arrays)
        version = request.fields["version"]
        if self._shard is None:
            self._shard = Shard(self._plan.optimizer, params, opt_state, version=version)
        else:
            self._shard.load(params, opt_state, version=version)
        self._loaded.set()

    def _answer(self, request: Message) -> Message:
        shard, fields = self._shard, request.fields
        assert shard is not None, "loaded"
        match request.name:
            case "pull":
                return Message("params", {}, shard.pull(fields["worker"], keep=fields["keep"]))
            case "push":
                return self._push(shard, request)
            case "reduce":
                factors = {int(part): float(factor) for part, factor in fields["factors"]}
                return Message("sum", {"squares": shard.reduce(fields["number"], factors)})
            case "apply":
                update = shard.apply(fields["number"], Facts(**fields["facts"]))
                return Message("applied", {"update": update})
            case "state":
                return Message("state", {}, shard.state(done=fields["done"]))
            case "statistics":
                received, sent = self.traffic()
                found = {"received": received, "sent": sent, "queue": shard.queue}
                return Message("statistics", {**found, "updates": shard.version})
        raise ValueError(f"unknown request {request.name!r}")

    def _push(self, shard: Shard, request: Message) -> Message:
        fields = request.fields
        if "facts" not in fields:
            shard.push(fields["number"], fields["worker"], request.arrays)
            return Message("stored")
        options: dict[str, Any] = {name: fields[name] for name in ("factor", "compensate")}
        facts = Facts(**fields["facts"])
        arrays = [np.asarray(array) for array in request.arrays]
        update = shard.push_and_apply(fields["number"], fields["worker"], arrays, facts, **options)
        return Message("applied", {"update": update})
