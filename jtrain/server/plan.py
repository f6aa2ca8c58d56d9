"""Plan of a run on parameter servers: what all of its processes derive from the same config."""

import dataclasses
import functools
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
import optax

from jtrain.core.types import Metrics
from jtrain.parallel import Server
from jtrain.parallel.strategies.outer_optimizer import LocalStepsState, WithLocalSteps
from jtrain.parallel.strategies.server import outer_rule
from jtrain.parallel.strategies.server_modes import BFloat16, Int8, StreamingDiLoCo, Uncompressed
from jtrain.server.codec import Codec, make_codec
from jtrain.server.compute import Head, Programs, Sums, has_clock, make_programs
from jtrain.server.fragments import FragmentSchedule, assign_fragments, split_fragments
from jtrain.server.partition import Partition, make_partition
from jtrain.train.program import Program, set_up

SLACK = 1 << 20  # bytes of a message beside the state


class Codecs(NamedTuple):
    """Codecs of what workers push and pull."""

    push: Codec
    pull: Codec


@dataclasses.dataclass(frozen=True)
class Plan:
    """Partition, programs and the structure of messages."""

    program: Program

    @property
    def snapshot_every(self) -> int:
        """Steps between two snapshots of the servers, in whole rounds."""
        return -(-self.server.snapshot_every // self.inner_steps) * self.inner_steps

    @property
    def server(self) -> Server:
        """The values under `parallel`."""
        parallel = self.program.resolved.config.parallel
        assert isinstance(parallel, Server), "the loop of another strategy"
        return parallel

    @property
    def inner_steps(self) -> int:
        """Steps of a round; 1 unless workers take steps of their own."""
        return getattr(self.server.mode, "inner_steps", 1)

    @property
    def is_local(self) -> bool:
        """Whether workers take steps of their own."""
        return outer_rule(self.server) is not None

    @property
    def has_clock(self) -> bool:
        """Whether each worker goes at its own pace."""
        return has_clock(self.server.mode)

    @functools.cached_property
    def partition(self) -> Partition:
        """Rows of each shard."""
        return make_partition(self.program.resolved.abstract_state.params, self.server.shards)

    @functools.cached_property
    def fragments(self) -> int:
        """Number of fragments of the parameters; 1 unless they are synchronized one by one."""
        mode = self.server.mode
        return max(self._assigned) + 1 if isinstance(mode, StreamingDiLoCo) else 1

    @functools.cached_property
    def _assigned(self) -> list[int]:
        """Fragment of each leaf."""
        mode = self.server.mode
        assert isinstance(mode, StreamingDiLoCo), "no other mode has fragments"
        return assign_fragments(self.program.resolved.abstract_state.params, mode.fragments)

    @functools.cached_property
    def fragment_schedule(self) -> FragmentSchedule:
        """Times of the fragments."""
        mode = self.server.mode
        assert isinstance(mode, StreamingDiLoCo), "no other mode has fragments"
        stop = self.program.resolved.config.steps
        return FragmentSchedule(mode.inner_steps, self.fragments, mode.overlap, stop)

    @functools.cached_property
    def parts(self) -> Partition:
        """Rows of each shard, of each fragment: what is pushed and updated as one."""
        several = self.fragments > 1
        return split_fragments(self.partition, self._assigned) if several else self.partition

    @functools.cached_property
    def part_shapes(self) -> list[list[np.ndarray]]:
        """Arrays with the shapes and dtypes of the leaves of each part, without memory."""
        empty = lambda x: np.broadcast_to(np.zeros((), x.dtype), x.shape)
        like, parts = (
            jax.tree.map(empty, self.program.resolved.abstract_state.params),
            range(len(self.parts.shards)),
        )
        return [jax.tree.leaves(self.parts.of_params(like, part)) for part in parts]

    def parts_of(self, shard: int, fragments: Iterable[int] | None = None) -> list[int]:
        """Return the parts of a shard, of some fragments or of all."""
        found = range(self.fragments) if fragments is None else fragments
        return [fragment * self.server.shards + shard for fragment in found]

    def by_part(self, by_shard: Sequence[Sequence[Any]]) -> list[Sequence[Any]]:
        """Return the leaves of each part, from those of all parts of each shard."""
        count = len(by_shard[0]) // self.fragments
        return [
            leaves[fragment * count : (fragment + 1) * count]
            for fragment in range(self.fragments)
            for leaves in by_shard
        ]

    @functools.cached_property
    def optimizer(self) -> optax.GradientTransformation:
        """The optimizer of the shards."""
        return outer_rule(self.server) or self.program.resolved.experiment.transformation

    @functools.cached_property
    def codecs(self) -> Codecs:
        """Codecs of pushes and of pulls."""
        kinds = {"exact": Uncompressed(), "bf16": BFloat16(), "int8": Int8()}
        return Codecs(make_codec(self.server.compress), make_codec(kinds[self.server.pulls]))

    @property
    def publishes(self) -> bool:
        """Whether workers pull what has changed since their last pull."""
        return self.server.pulls == "int8"

    @functools.cached_property
    def programs(self) -> Programs:
        """Programs of a worker."""
        return make_programs(self.program, self.server, self.inner_rule)

    @functools.cached_property
    def inner_rule(self) -> optax.GradientTransformation:
        """The experiment's own optimizer."""
        rule = self.program.resolved.experiment.transformation
        return rule.inner if isinstance(rule, WithLocalSteps) else rule

    @property
    def shard_opt_state(self) -> Any:
        """Shapes of the state of the shards' optimizer, for all parameters."""
        state = self.program.resolved.abstract_state.opt_state
        return state.outer if isinstance(state, LocalStepsState) else state

    @functools.cached_property
    def head(self) -> Head:
        """Shapes of the head."""
        return Head.of(self.program.resolved.abstract_state)

    @functools.cached_property
    def inner_state(self) -> Any:
        """Shapes of a worker's own state: the inner optimizer's, or all of a WorkerState."""
        rule = self.program.resolved.experiment.transformation
        init = rule.init_worker if isinstance(rule, WithLocalSteps) else rule.init
        return jax.eval_shape(init, self.program.resolved.abstract_state.params)

    @functools.cached_property
    def sums(self) -> Sums:
        """Shapes of what a worker reports of a step."""
        batch = shapes_of(self.program.batches().train[0])
        like = jax.eval_shape(lambda: self.program.resolved.abstract_state)
        return jax.eval_shape(self.programs.whole, like, batch)[0]

    @functools.cached_property
    def metrics(self) -> Metrics:
        """Shapes of the metrics of a local step."""
        batch = shapes_of(self.program.batches().train[0])
        head = jax.eval_shape(lambda: self.head)
        opt_state = jax.eval_shape(
            self.inner_rule.init, self.program.resolved.abstract_state.params
        )
        state = head.state(self.program.resolved.abstract_state.params, opt_state)
        return jax.eval_shape(self.programs.inner, state, batch)[1]

    @property
    def most(self) -> int:
        """Limit of the arrays of a message in bytes."""
        leaves = jax.tree.leaves((self.program.resolved.abstract_state, self.inner_state))
        return 2 * sum(leaf.size * leaf.dtype.itemsize for leaf in leaves) + SLACK


def shapes_of(tree: Any) -> Any:
    """Return the shapes and dtypes of arrays, as JAX would hold them."""
    canonical = jax.dtypes.canonicalize_dtype
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, canonical(x.dtype)), tree)


def make_plan(config: Any, seconds: float = 0.0) -> Plan:
    """Return the plan of a config.

    Raises:
        UserError: as `set_up`.
    """
    return Plan(set_up(config, seconds))
