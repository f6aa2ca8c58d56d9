"""Plan of a run on parameter servers: what all of its processes derive from the same config."""

import dataclasses
import functools
from typing import Any

import jax
import optax

from jtrain.core.types import Metrics
from jtrain.parallel import Server
from jtrain.parallel.strategies.local_steps import LocalStepsState, WithLocalSteps
from jtrain.parallel.strategies.server import outer_rule
from jtrain.server.compute import Head, Programs, Sums, has_clock, make_programs
from jtrain.server.partition import Partition, make_partition
from jtrain.train.setup import TrainSetup, set_up

SLACK = 1 << 20  # bytes of a message beside the state


@dataclasses.dataclass(frozen=True)
class Plan:
    """Partition, programs and the structure of messages."""

    setup: TrainSetup

    @property
    def server(self) -> Server:
        """The values under `parallel`."""
        parallel = self.setup.config.parallel
        assert isinstance(parallel, Server), "the loop of another strategy"
        return parallel

    @property
    def inner_steps(self) -> int:
        """Steps of a round; 1 unless workers take steps of their own."""
        return getattr(self.server.mode, "inner_steps", 1)

    @property
    def is_local(self) -> bool:
        """Whether workers take steps of their own."""
        return outer_rule(self.server.mode) is not None

    @property
    def has_clock(self) -> bool:
        """Whether each worker goes at its own pace."""
        return has_clock(self.server.mode)

    @functools.cached_property
    def partition(self) -> Partition:
        """Rows of each shard."""
        return make_partition(self.setup.like.params, self.server.shards)

    @functools.cached_property
    def optimizer(self) -> optax.GradientTransformation:
        """The optimizer of the shards."""
        return outer_rule(self.server.mode) or self.setup.experiment.transformation

    @functools.cached_property
    def programs(self) -> Programs:
        """Programs of a worker."""
        return make_programs(self.setup, self.server, self.inner_rule)

    @functools.cached_property
    def inner_rule(self) -> optax.GradientTransformation:
        """The experiment's own optimizer."""
        rule = self.setup.experiment.transformation
        return rule.inner if isinstance(rule, WithLocalSteps) else rule

    @property
    def shard_opt_state(self) -> Any:
        """Shapes of the state of the shards' optimizer, for all parameters."""
        state = self.setup.like.opt_state
        return state.outer if isinstance(state, LocalStepsState) else state

    @functools.cached_property
    def head(self) -> Head:
        """Shapes of the head."""
        return Head.of(self.setup.like)

    @functools.cached_property
    def inner_state(self) -> Any:
        """Shapes of a worker's own optimizer state."""
        return jax.eval_shape(self.inner_rule.init, self.setup.like.params)

    @functools.cached_property
    def sums(self) -> Sums:
        """Shapes of what a worker reports of a step."""
        batch = shapes_of(self.setup.train[0])
        like = jax.eval_shape(lambda: self.setup.like)
        return jax.eval_shape(self.programs.whole, like, batch)[0]

    @functools.cached_property
    def metrics(self) -> Metrics:
        """Shapes of the metrics of a local step."""
        batch = shapes_of(self.setup.train[0])
        head = jax.eval_shape(lambda: self.head)
        state = head.state(self.setup.like.params, self.inner_state)
        return jax.eval_shape(self.programs.inner, state, batch)[1]

    @property
    def most(self) -> int:
        """Limit of the arrays of a message in bytes."""
        leaves = jax.tree.leaves((self.setup.like, self.inner_state))
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
