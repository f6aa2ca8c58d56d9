"""Service of a shard: requests of workers and of the coordinator, one at a time."""

import threading
from collections.abc import Callable, Mapping
from typing import Any

import jax
import numpy as np

from jtrain.server.feedback import Publisher
from jtrain.server.listener import Traffic
from jtrain.server.plan import Plan
from jtrain.server.shard import Facts, Shard
from jtrain.server.wire import Message, WireError


class ShardService:
    """Answers of a shard; workers wait until it is loaded."""

    def __init__(self, plan: Plan, index: int):
        self._plan, self._index = plan, index
        self.traffic: Callable[[], Traffic] = lambda: Traffic(0, 0, 0)
        """Gives the bytes so far."""
        self._lock = threading.Lock()
        self._loaded = threading.Event()
        self._fragments: list[Shard] = []
        like = plan.program.resolved.abstract_state.params, plan.shard_opt_state
        self._tree = jax.tree.structure(like)

    def handle(self, request: Message) -> Message:
        """Answer a request; called in a thread of each peer."""
        if request.name == "load":
            with self._lock:
                self._load(request)
            return Message("loaded")
        if not self._loaded.wait(self._plan.server.timeout / 2):
            raise WireError("the server holds no parameters yet")  # the peer asks again
        with self._lock:
            return self._answer(request)

    def _load(self, request: Message) -> None:
        version = request.fields["version"]
        for fragment, leaves in enumerate(self._plan.by_part([request.arrays])):
            params, opt_state = self._tree.unflatten(leaves)
            if fragment < len(self._fragments):
                self._fragments[fragment].load(params, opt_state, version=version)
            else:
                publisher = Publisher(self._plan.codecs.pull) if self._plan.publishes else None
                shard = Shard(
                    self._plan.optimizer, params, opt_state, version=version, publisher=publisher
                )
                self._fragments.append(shard)
        self._loaded.set()

    def _answer(self, request: Message) -> Message:
        fields = request.fields
        shard = self._fragments[fields.get("fragment", 0)]
        match request.name:
            case "pull":
                return self._pull(fields)
            case "push":
                return self._push(shard, request)
            case "reduce":
                factors = {int(part): float(factor) for part, factor in fields["factors"]}
                return Message("sum", {"squares": shard.reduce(fields["number"], factors)})
            case "apply":
                update = shard.apply(fields["number"], Facts(**fields["facts"]))
                return Message("applied", {"update": update})
            case "state":
                states = [each.state(done=fields["done"]) for each in self._fragments]
                missed = sum(each.missed for each in self._fragments)
                return Message(
                    "state", {"missed": missed}, [leaf for leaves in states for leaf in leaves]
                )
            case "statistics":
                received, sent, worker_bytes = self.traffic()
                found = {"received": received, "sent": sent, "worker_bytes": worker_bytes}
                found["queue"] = sum(each.queue for each in self._fragments)
                found["updates"] = sum(each.version for each in self._fragments)
                return Message("statistics", found)
        raise ValueError(f"unknown request {request.name!r}")

    def _pull(self, fields: Mapping[str, Any]) -> Message:
        if self._plan.publishes:
            wanted = zip(fields["fragments"], fields["known"], strict=True)
            replies = [self._fragments[fragment].pull_change(known) for fragment, known in wanted]
            parts = [(reply.stamp, reply.kind, len(reply.arrays)) for reply in replies]
            arrays = [array for reply in replies for array in reply.arrays]
            return Message("changes", {"parts": parts}, arrays)
        found = [
            self._fragments[fragment].pull(fields["worker"], keep=fields["keep"])
            for fragment in fields["fragments"]
        ]
        leaves = [leaf for leaves in found for leaf in leaves]
        return Message("params", {}, self._plan.codecs.pull.encode(leaves))

    def _push(self, shard: Shard, request: Message) -> Message:
        fields = request.fields
        like = jax.tree.leaves(shard.params)
        grads = self._plan.codecs.push.decode(request.arrays, like)
        if "facts" not in fields:
            shard.push(fields["number"], fields["worker"], grads)
            return Message("stored")
        options: dict[str, Any] = {name: fields[name] for name in ("factor", "compensate")}
        facts = Facts(**fields["facts"])
        arrays = [np.asarray(array) for array in grads]
        update = shard.push_and_apply(fields["number"], fields["worker"], arrays, facts, **options)
        return Message("applied", {"update": update})
