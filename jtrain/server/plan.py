"""Plan of a run on parameter servers: what all of its processes derive from the same config.

Also the programs of a worker: what it computes of a batch, from the parts of `make_step`.
"""

import dataclasses
import functools
import os
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from jtrain.core.finite import is_finite_update
from jtrain.core.gradient import make_gradient
from jtrain.core.loss import update_extra
from jtrain.core.loss_checks import check_split_rows
from jtrain.core.mean import Mean, sum_dtype
from jtrain.core.pytree import norm
from jtrain.core.state import TrainState
from jtrain.core.step import StepFn, make_step
from jtrain.core.types import Batch, Extra, Leaf, Metrics, Params
from jtrain.distributed.cluster.tls import PeerTls
from jtrain.parallel import Server
from jtrain.parallel.strategies.outer_optimizer import LocalStepsState, WithLocalSteps
from jtrain.parallel.strategies.server import outer_rule
from jtrain.parallel.strategies.server_modes import (
    SSP,
    Async,
    BFloat16,
    Int8,
    StreamingDiLoCo,
    Uncompressed,
    splits_rows,
)
from jtrain.server.codec import Codec, make_codec
from jtrain.server.partition import (
    FragmentSchedule,
    Partition,
    assign_fragments,
    make_partition,
    split_fragments,
)
from jtrain.train.program import Program

SLACK = 1 << 20  # bytes of a message beside the state


def head_of(state: TrainState) -> TrainState:
    """Return a state without parameters and optimizer state: small, and sent with each step."""
    return dataclasses.replace(state, params=(), opt_state=())


class Sums(NamedTuple):
    """Sums over rows, beside the gradient."""

    value: Leaf  # of the loss, f32 scalar
    metrics: Metrics
    changes: Extra


class Programs(NamedTuple):
    """Pure functions that a worker compiles, of a program."""

    weights: Callable[[TrainState, Batch], list[Leaf]]
    """Weights of the terms of the loss, summed over the rows."""
    share: Callable[[TrainState, Batch, list[Leaf]], tuple[Sums, Params]]
    """Sums and gradient of some rows, divided by the weights of the whole batch."""
    whole: Callable[[TrainState, Batch], tuple[Sums, Params, Leaf, Leaf]]
    """Sums and gradient of a batch, its norm, and whether all of it is finite."""
    inner: StepFn
    """A complete step, whose loss has the weight of the rows."""


@dataclasses.dataclass(frozen=True)
class Plan:
    """Partition, programs and the structure of messages."""

    program: Program

    @property
    def server(self) -> Server:
        """The values under `parallel`."""
        parallel = self.program.resolved.config.parallel
        assert isinstance(parallel, Server), "the loop of another strategy"
        return parallel

    @property
    def abstract_state(self) -> TrainState:
        """Shapes of the state of the run."""
        return self.program.resolved.abstract_state

    @property
    def inner_steps(self) -> int:
        """Steps of a round; 1 unless workers take steps of their own."""
        return getattr(self.server.mode, "inner_steps", 1)

    @property
    def snapshot_every(self) -> int:
        """Steps between two snapshots of the servers, in whole rounds."""
        return -(-self.server.snapshot_every // self.inner_steps) * self.inner_steps

    @property
    def is_local(self) -> bool:
        """Whether workers take steps of their own."""
        return outer_rule(self.server) is not None

    @property
    def has_clock(self) -> bool:
        """Whether workers take steps of the run one by one, each at its own pace."""
        return isinstance(self.server.mode, Async | SSP)

    @functools.cached_property
    def partition(self) -> Partition:
        """Rows of each shard."""
        return make_partition(self.abstract_state.params, self.server.shards)

    @functools.cached_property
    def parts(self) -> Partition:
        """Rows of each shard, of each fragment: what is pushed and updated as one."""
        return split_fragments(self.partition, self._assigned)

    @functools.cached_property
    def _assigned(self) -> list[int]:
        """Fragment of each leaf; all are one unless fragments are synchronized one by one."""
        params, mode = self.abstract_state.params, self.server.mode
        return assign_fragments(params, mode.fragments if isinstance(mode, StreamingDiLoCo) else 1)

    @functools.cached_property
    def fragments(self) -> int:
        """Number of fragments of the parameters."""
        return max(self._assigned, default=0) + 1

    @functools.cached_property
    def fragment_schedule(self) -> FragmentSchedule:
        """Times of the fragments."""
        mode, stop = self.server.mode, self.program.resolved.config.steps
        assert isinstance(mode, StreamingDiLoCo), "no other mode has fragments"
        return FragmentSchedule(mode.inner_steps, self.fragments, mode.overlap, stop)

    def parts_of(self, fragment: int) -> range:
        """Return the parts of a fragment, one of each shard."""
        return range(fragment * self.server.shards, (fragment + 1) * self.server.shards)

    @functools.cached_property
    def part_shapes(self) -> list[list[np.ndarray]]:
        """Arrays with the shapes and dtypes of the leaves of each part, without memory."""
        empty = lambda x: np.broadcast_to(np.zeros((), x.dtype), x.shape)
        params = jax.tree.map(empty, self.abstract_state.params)
        parts = range(len(self.parts.shards))
        return [jax.tree.leaves(self.parts.of_params(params, part)) for part in parts]

    @functools.cached_property
    def optimizer(self) -> optax.GradientTransformation:
        """The optimizer of the shards."""
        return outer_rule(self.server) or self.program.resolved.experiment.transformation

    @functools.cached_property
    def inner_rule(self) -> optax.GradientTransformation:
        """The experiment's own optimizer."""
        rule = self.program.resolved.experiment.transformation
        return rule.inner if isinstance(rule, WithLocalSteps) else rule

    @functools.cached_property
    def push_codec(self) -> Codec:
        """Codec of what workers push."""
        return make_codec(self.server.compress)

    @functools.cached_property
    def pull_codec(self) -> Codec:
        """Codec of what workers pull."""
        kinds = {"exact": Uncompressed(), "bf16": BFloat16(), "int8": Int8()}
        return make_codec(kinds[self.server.pulls])

    @property
    def publishes(self) -> bool:
        """Whether workers pull what has changed since their last pull."""
        return self.server.pulls == "int8"

    @property
    def shard_opt_state(self) -> Any:
        """Shapes of the state of the shards' optimizer, for all parameters."""
        state = self.abstract_state.opt_state
        return state.outer if isinstance(state, LocalStepsState) else state

    @functools.cached_property
    def inner_state(self) -> Any:
        """Shapes of a worker's own state: the inner optimizer's, or all of a WorkerState."""
        rule = self.program.resolved.experiment.transformation
        init = rule.init_worker if isinstance(rule, WithLocalSteps) else rule.init
        return jax.eval_shape(init, self.abstract_state.params)

    @functools.cached_property
    def report(self) -> Any:
        """Shapes of what a worker reports of a step: sums; or of local steps, metrics and head."""
        like = jax.eval_shape(lambda: self.abstract_state)
        batch = shapes_of(self.program.batches().train[0])
        if not self.is_local:
            return jax.eval_shape(self.programs.whole, like, batch)[0]
        opt_state = jax.eval_shape(self.inner_rule.init, like.params)
        state = dataclasses.replace(like, opt_state=opt_state)
        state, metrics = jax.eval_shape(self.programs.inner, state, batch)
        return metrics, head_of(state)

    @property
    def connection(self) -> dict[str, Any]:
        """Options of a connection: bytes of the arrays of a message, seconds, certificates.

        Raises:
            ConfigError: if a certificate cannot be used.
        """
        leaves = jax.tree.leaves((self.abstract_state, self.inner_state))
        size = sum(leaf.size * leaf.dtype.itemsize for leaf in leaves)
        tls = PeerTls.read(os.environ, supported=True)
        return {"most": 2 * size + SLACK, "timeout": self.server.timeout, "tls": tls}

    @functools.cached_property
    def programs(self) -> Programs:
        """Programs of a worker.

        Raises:
            LossError: if the loss couples the rows of a batch that would be split.
        """
        config, x = self.program.resolved.config, self.program.resolved.experiment
        copies = splits_rows(self.server.mode) and self.server.workers > 1
        check_split_rows(x.rows_interact, config.microbatches, copies)
        arguments = {"microbatches": config.microbatches, "ragged": x.train.ragged}
        arguments |= {"compute": config.precision.compute}

        def weights(state: TrainState, batch: Batch) -> list[Leaf]:
            found: list[Any] = []
            record = lambda sums: found.append(sums) or sums
            make_gradient(x.loss, psum=record, **arguments)(state, batch)
            return found[0]

        def share(state: TrainState, batch: Batch, weights: list[Leaf]) -> tuple[Sums, Params]:
            psums = iter([lambda _: weights, lambda sums: sums])  # of the weights, of the gradient
            bind = make_gradient(x.loss, psum=lambda sums: next(psums)(sums), **arguments)
            value, grads, metrics, changes = bind(state, batch)(state.params)
            return Sums(value, metrics, changes), grads

        def whole(state: TrainState, batch: Batch) -> tuple[Sums, Params, Leaf, Leaf]:
            bind = make_gradient(x.loss, **arguments)
            value, grads, metrics, changes = bind(state, batch)(state.params)
            sums, grad_norm = Sums(value, metrics, changes), norm(grads)
            return sums, grads, grad_norm, finish(head_of(state), sums, grad_norm)[1]

        step = make_step(x.loss, self.inner_rule, rows_interact=x.rows_interact, **arguments)

        def inner(state: TrainState, batch: Batch) -> tuple[TrainState, Metrics]:
            weight = sum(weights(state, batch), start=jnp.float32(0))
            state, metrics = step(state, batch)
            total = jnp.where(weight == 0, 0, metrics["loss"].total * weight)
            return state, {**metrics, "loss": Mean(total, weight)}

        return Programs(weights, share, whole, inner)


def finish(head: TrainState, sums: Sums, grad_norm: Leaf) -> tuple[TrainState, Leaf]:
    """Return the head after a step, as `make_step` computes it, and whether its update is taken."""
    extra = update_extra(head.extra, sums.changes)
    forward = jnp.isfinite(sums.value) & is_finite_update(extra, sums.changes)
    finite = forward & jnp.isfinite(grad_norm)
    after = dataclasses.replace(
        head,
        step=head.step + 1,
        skipped=head.skipped + ~finite,
        scale=head.scale.after(finite, overflow=forward & ~finite),
        extra=jax.tree.map(lambda new, old: jnp.where(finite, new, old), extra, head.extra),
    )
    return after, finite


def step_metrics(
    before: TrainState, after: TrainState, sums: Sums, norms: tuple[float, float]
) -> Metrics:
    """Return the metrics of a step, as `make_step` names them.

    Args:
        norms: of the gradient and of the update.
    """
    own = {"loss": sums.value, "grad_norm": norms[0], "update_norm": norms[1]}
    own |= {"skipped": after.skipped, **before.scale.metrics()}
    one = jnp.float32(1)
    means = {name: Mean(jnp.asarray(x, sum_dtype(x)), one) for name, x in own.items()}
    return {**sums.metrics, **means}


def shapes_of(tree: Any) -> Any:
    """Return the shapes and dtypes of arrays, as JAX would hold them."""
    canonical = jax.dtypes.canonicalize_dtype
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, canonical(x.dtype)), tree)
