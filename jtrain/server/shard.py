"""Shards: parts of the parameters and of the optimizer's state, and what a server answers of them.

A shard knows no network. Its methods are called by one thread at a time.
"""

import dataclasses
import threading
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from jtrain.core.extra_arguments import with_named_arguments
from jtrain.core.pytree import at_least_f32, norm
from jtrain.core.types import Leaf, Params
from jtrain.server.codec import Published, Publisher
from jtrain.server.listener import Listener
from jtrain.server.plan import Plan
from jtrain.server.wire import Message, WireError


@dataclasses.dataclass(frozen=True)
class Facts:
    """Numbers of a whole step that an update depends on."""

    finite: bool
    value: float
    """The loss."""
    grad_norm: float
    """Norm of the gradient over all shards."""


class Shard:
    """Rows of the parameters, and the optimizer's state for them.

    Args:
        params: the rows of this shard.
        version: updates so far.
        publisher: of what has changed, whose state `with_published` has in the optimizer's.
    """

    def __init__(
        self,
        optimizer: optax.GradientTransformation,
        params: Params,
        opt_state: optax.OptState,
        *,
        version: int = 0,
        publisher: Publisher | None = None,
    ):
        self._publisher = publisher
        self.updates = 0
        """Updates since this shard was made."""
        update = _make_update(optimizer)
        self._update = jax.jit(update, donate_argnums=(0, 1))
        self._update_keeping = jax.jit(update)
        self._compensate = jax.jit(_compensate)
        self._tree = jax.tree.structure(params)
        self.load(params, opt_state, version=version)

    def load(self, params: Params, opt_state: optax.OptState, *, version: int) -> None:
        """Replace the state, and forget every push."""
        self.params, self.opt_state = jax.tree.map(jnp.array, (params, opt_state))  # to donate
        self.applied = Applied(version)
        self.missed = 0
        """Updates that are done, and that this shard never had."""
        self._parts: dict[int, list[np.ndarray]] = {}
        self._pulled: dict[int, Params] = {}
        self._mean: Params = None
        if self._publisher is not None:
            self._publisher.reset()

    @property
    def version(self) -> int:
        """Number of updates."""
        return len(self.applied)

    @property
    def queue(self) -> int:
        """Pushes that wait for others."""
        return len(self._parts)

    def pull(self, worker: int, *, keep: bool = False) -> list[np.ndarray]:
        """Return the leaves of the parameters; `keep` them to compensate the worker's push."""
        if keep:
            self._pulled[worker] = self.params
        return [np.asarray(leaf) for leaf in jax.tree.leaves(self.params)]

    def pull_change(self, known: str) -> Published:
        """Return what a worker with the version `known` lacks."""
        assert self._publisher is not None, "this shard publishes no changes"
        return self._publisher.answer(known, self._published())

    def push(self, number: int, part: int, grads: Sequence[np.ndarray]) -> None:
        """Store a part of the gradient of update `number`, until all are added up.

        A part that comes again replaces itself; one of another update than the next is dropped.
        """
        if number == self.version + 1:
            self._parts[part] = list(grads)

    def reduce(self, number: int, factors: Mapping[int, float]) -> float:
        """Add up the parts times their factors, in order; return the sum of squares.

        Raises:
            LookupError: if a part is missing.
        """
        missing = sorted(set(factors) - set(self._parts))
        if missing or number != self.version + 1:
            raise LookupError(f"parts {missing} of update {number} are missing")
        parts = [self._parts[part] for part in sorted(factors)]
        weights = [factors[part] for part in sorted(factors)]
        total = [_weighted_sum(leaves, weights) for leaves in zip(*parts, strict=True)]
        self._mean = self._tree.unflatten(total)
        return sum(float(np.vdot(leaf, leaf)) for leaf in map(np.ravel, total))

    def apply(self, number: int, facts: Facts) -> float:
        """Apply the sum of update `number`; return the sum of squares of the update.

        A second call for the same update changes nothing, and returns the same.
        """
        if number not in self.applied:
            self._last = self._take(self._mean, facts)
            self._count(number)
            self._parts, self._mean = {}, None
        return self._last

    def push_and_apply(
        self,
        number: int,
        worker: int,
        grads: Sequence[np.ndarray],
        facts: Facts,
        *,
        factor: float = 1.0,
        compensate: float = 0.0,
    ) -> float:
        """Apply a gradient times a factor, unless this update was applied before.

        A factor of 0 counts the update and changes nothing.

        Args:
            compensate: strength of the correction for what has changed since the worker's pull.
        """
        if number in self.applied:
            return 0.0
        self._count(number)
        before = self._pulled.pop(worker, None)
        if factor == 0:
            return 0.0
        tree = self._tree.unflatten([g if factor == 1 else g * g.dtype.type(factor) for g in grads])
        if compensate and before is not None:
            tree = self._compensate(tree, self.params, before, compensate)
        norm = facts.grad_norm * factor
        return self._take(tree, dataclasses.replace(facts, grad_norm=norm))

    def state(self, *, done: int | None = None) -> list[np.ndarray]:
        """Return the leaves of parameters and optimizer state.

        Args:
            done: the update up to which all are done, so that none of them comes again.
        """
        if done is not None:
            self.missed += done - self.version
            self.applied = Applied(done)
        return [np.asarray(leaf) for leaf in jax.tree.leaves((self.params, self.opt_state))]

    def _count(self, number: int) -> None:
        self.applied.add(number)
        self.updates += 1

    def _take(self, grads: Params, facts: Facts) -> float:
        if not facts.finite:
            return 0.0
        size = self._update_params(grads, facts)
        if self._publisher is not None:
            found = self._publisher.publish(jax.tree.leaves(self.params), self._published())
            published = self._tree.unflatten([jnp.array(leaf) for leaf in found])
            self.opt_state = self.opt_state._replace(published=published)
        return size

    def _published(self) -> list[np.ndarray]:
        return [np.asarray(leaf) for leaf in jax.tree.leaves(self.opt_state.published)]

    def _update_params(self, grads: Params, facts: Facts) -> float:
        # In place: a new array of 100 MB costs 30 ms of page faults. JAX copies what a reply that
        # is still being sent reads (numpy's views), but not what is kept for a compensation.
        kept = any(params is self.params for params in self._pulled.values())
        update = self._update_keeping if kept else self._update
        known = jnp.float32(facts.value), jnp.float32(facts.grad_norm)
        self.params, self.opt_state, size = update(self.params, self.opt_state, grads, *known)
        return float(size) ** 2


def _make_update(optimizer: optax.GradientTransformation):
    """Return `(params, opt_state, grads, value, grad_norm) -> (params, opt_state, norm of update)`.

    The update of `make_step` for a gradient that is finite, with the norm of all shards in the
    place of this one's. Without the branch of `update_if`, whose result XLA stores, an update of
    100 MB takes half the time.
    """
    update = with_named_arguments(optimizer).update

    def take(params: Params, opt_state: Any, grads: Params, value: Leaf, grad_norm: Leaf):
        grads = optax.tree.cast_like(grads, params)
        known = {"value": value, "grad": grads, "grad_norm": grad_norm}
        updates, opt_state = update(grads, opt_state, params, **known)
        updates = optax.tree.cast_like(updates, params)
        return optax.apply_updates(params, updates), opt_state, norm(updates)

    return take


def _compensate(grads: Params, now: Params, before: Params, strength: Any) -> Params:
    return jax.tree.map(lambda g, v, w: g + strength * g * g * (v - w), grads, now, before)


def _weighted_sum(leaves: Sequence[np.ndarray], weights: Sequence[float]) -> np.ndarray:
    wide = at_least_f32(jnp.asarray(leaves[0][:0] if leaves[0].ndim else leaves[0])).dtype
    total = np.zeros(leaves[0].shape, wide)
    for leaf, weight in zip(leaves, weights, strict=True):
        total += leaf if weight == 1 else leaf * total.dtype.type(weight)
    return total


class Applied:
    """Numbers that were applied, from 1 on: all up to `low`, and some above it."""

    def __init__(self, low: int = 0):
        self.low = low
        self._above: set[int] = set()

    def __contains__(self, number: int) -> bool:
        return number <= self.low or number in self._above

    def __len__(self) -> int:
        return self.low + len(self._above)

    def add(self, number: int) -> None:
        """Record a number."""
        self._above.add(number)
        while self.low + 1 in self._above:
            self.low += 1
            self._above.remove(self.low)


class ShardService:
    """Answers of a shard, which is one for each fragment; workers wait until it is loaded."""

    def __init__(self, plan: Plan):
        self._plan = plan
        self.traffic: Listener | None = None
        """Counts the bytes."""
        self._lock = threading.Lock()
        self._loaded = threading.Event()
        self._shards: dict[int, Shard] = {}  # by fragment

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
        plan, fragment = self._plan, request.fields["fragment"]
        tree = jax.tree.structure((plan.abstract_state.params, plan.shard_opt_state))
        state, version = tree.unflatten(request.arrays), request.fields["version"]
        if fragment in self._shards:
            self._shards[fragment].load(*state, version=version)
        else:
            publisher = Publisher(plan.pull_codec) if plan.publishes else None
            made = Shard(plan.optimizer, *state, version=version, publisher=publisher)
            self._shards[fragment] = made
        if len(self._shards) == plan.fragments:
            self._loaded.set()

    def _answer(self, request: Message) -> Message:
        fields = request.fields
        shard = self._shards[fields.get("fragment", 0)]
        match request.name:
            case "pull" if self._plan.publishes:
                version, kind, arrays = shard.pull_change(fields["known"])
                return Message("change", {"version": version, "kind": kind}, arrays)
            case "pull":
                leaves = shard.pull(fields["worker"], keep=fields["keep"])
                return Message("params", {}, self._plan.pull_codec.encode(leaves))
            case "push":
                return self._push(shard, request)
            case "reduce":
                factors = {int(part): float(factor) for part, factor in fields["factors"]}
                return Message("sum", {"squares": shard.reduce(fields["number"], factors)})
            case "apply":
                update = shard.apply(fields["number"], Facts(**fields["facts"]))
                return Message("applied", {"update": update})
            case "state":
                leaves = shard.state(done=fields["done"])
                return Message("state", {"missed": shard.missed}, leaves)
            case "statistics":
                assert self.traffic is not None, "it is set when it listens"
                found = {"received": self.traffic.received, "sent": self.traffic.sent}
                found["worker_bytes"] = sum(self.traffic.by_name[x] for x in ("push", "pull"))
                found["queue"] = sum(each.queue for each in self._shards.values())
                found["updates"] = sum(each.updates for each in self._shards.values())
                return Message("statistics", found)
        raise ValueError(f"unknown request {request.name!r}")

    def _push(self, shard: Shard, request: Message) -> Message:
        fields = request.fields
        like = jax.tree.leaves(shard.params)
        grads = [np.asarray(g) for g in self._plan.push_codec.decode(request.arrays, like)]
        if "facts" not in fields:
            shard.push(fields["number"], fields["worker"], grads)
            return Message("stored")
        options = {name: fields[name] for name in ("factor", "compensate")}
        facts = Facts(**fields["facts"])
        update = shard.push_and_apply(fields["number"], fields["worker"], grads, facts, **options)
        return Message("applied", {"update": update})
