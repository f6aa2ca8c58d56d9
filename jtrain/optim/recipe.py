"""What every optimizer has around its rule: clipping, decay, groups, and the rate over the run."""

import abc
import functools
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import optax
from pydantic import Field

from jtrain.config.configclass import configclass
from jtrain.config.durations import Duration
from jtrain.core import pytree
from jtrain.core.types import Dims, Leaf, Params, Tree
from jtrain.errors import ConfigError
from jtrain.optim.average import with_average
from jtrain.optim.clip import clip_by_norm
from jtrain.optim.evaluation import chain_before
from jtrain.optim.groups import ParamGroup, check_patterns, group_of, matches
from jtrain.optim.schedules import Constant, LearningRate, Schedule
from jtrain.optim.stacked_layers import layer_ndim
from jtrain.optim.trained_only import freeze_others

NamedDims: TypeAlias = Mapping[str, Dims]  # by parameter, as `Model.dims` has them
NO_NAMES: NamedDims = MappingProxyType({})


@configclass
class OptimizerConfig(abc.ABC):
    """An optimizer but for its rule, which a member gives by `rule`.

    The gradients arrive summed over devices and microbatches. In order: those of frozen leaves are
    dropped, the rest is clipped, by value and then by norm, the rule turns it into a direction
    (weight decay comes in where the rule wants it), and the learning rate and the group's factor
    scale it.
    """

    lr: float = Field(gt=0)
    """Peak learning rate."""
    schedule: Schedule = Field(default_factory=Constant)
    """How the learning rate goes over the run."""
    clip: float = Field(default=0.0, ge=0)
    """Largest norm of the whole gradient, frozen leaves left out; 0 clips nothing."""
    clip_value: float = Field(default=0.0, ge=0)
    """Largest size of each number of the gradient, cut before the norm is taken; 0 cuts nothing."""
    weight_decay: float = Field(default=0.0, ge=0)
    """Decay of the weights that `decay` names, before the learning rate scales it."""
    decay: tuple[str, ...] = ()
    """Patterns of the leaves that decay; empty means every leaf of two or more dims, which leaves
    out biases and scales of norms. A leading dim in which layers are stacked does not count."""
    groups: tuple[ParamGroup, ...] = ()
    """Leaves with a learning rate, a decay, or a rest of their own; the first match counts."""
    ema: float = Field(default=0.0, ge=0, lt=1)
    """Share of the running average of the parameters that is kept each step, 0.999 say; evaluation
    and samples use the average then. 0 keeps none."""

    @abc.abstractmethod
    def rule(self, decay: optax.GradientTransformation) -> optax.GradientTransformation:
        """Gradient -> ascent direction of unit learning rate, with `decay` where it belongs."""

    def layered_rule(
        self, decay: optax.GradientTransformation, dims: NamedDims
    ) -> optax.GradientTransformation:
        """Return the rule for leaves of which some stack layers, as their `dims` say.

        Override it where the rule depends on a leaf as a whole, its norm or its number of dims: a
        stack then takes the steps of its layers.
        """
        del dims
        return self.rule(decay)

    def learning_rate(self, steps: int) -> LearningRate:
        """The rate at each step (from 0) of a run of `steps`.

        Raises:
            ConfigError: if the warmup leaves no step.
        """
        return self.schedule.build(self.lr, steps)

    def build(self, steps: int, dims: NamedDims = NO_NAMES) -> optax.GradientTransformation:
        """The transformation for a run of `steps`; its `init` raises where a pattern fits no leaf.

        Args:
            steps: of the whole run, for the schedule.
            dims: the names of the parameters' dims, `Model.dims`. A leading dim `layers` is a stack
                of layers, each of which takes the steps that it would take as a leaf of its own.

        Raises:
            ConfigError: if the warmup leaves no step.
        """
        if isinstance(steps, Duration):
            raise TypeError(f"{steps} is not counted in steps yet: write optimizer=self.optimizer")
        rate = self.learning_rate(steps)
        decay = _by_name(lambda u, p, decay: u + decay * p, functools.partial(self._decay_of, dims))
        optimizer = self.descent(self.layered_rule(decay, dims), self._scale(rate), rate)
        if self.ema:
            optimizer = with_average(optimizer, self.ema)
        if any(group.freeze for group in self.groups):
            optimizer = freeze_others(optimizer, self._trained)
        return chain_before(optax.chain(*self._before(dims)), optimizer)

    def descent(
        self,
        rule: optax.GradientTransformation,
        scale: optax.GradientTransformation,
        rate: LearningRate,
    ) -> optax.GradientTransformation:
        """Gradient -> update: the rule, then `scale`, by minus the rate and the groups' factors."""
        del rate
        return optax.chain(rule, scale)

    def check(self, leaves: Mapping[str, Leaf], dims: NamedDims = NO_NAMES) -> None:
        """Makes sure that these values mean something for the leaves, by name.

        Raises:
            ConfigError: if a pattern does nothing.
        """
        del dims
        check_patterns(leaves, self.groups, self.decay)

    def _before(self, dims: NamedDims) -> list[optax.GradientTransformation]:
        """What comes before the rule."""
        stages = [self._chosen(dims)]
        if self.clip_value:
            stages.append(optax.clip(self.clip_value))
        if self.clip:
            stages.append(clip_by_norm(self.clip))
        return stages

    def _scale(self, rate: LearningRate) -> optax.GradientTransformation:
        """The learning rate, downhill, and the factors of the groups."""
        by_rate = optax.scale_by_learning_rate(rate)
        if all(group.lr == 1 for group in self.groups):
            return by_rate
        return optax.chain(_by_name(lambda u, _, factor: u * factor, self._factor_of), by_rate)

    def _chosen(self, dims: NamedDims) -> optax.GradientTransformation:
        """Gradients of frozen leaves set to zero; `init` checks every pattern."""

        def init(params: Params) -> optax.EmptyState:
            self.check(pytree.named_leaves(params), dims)
            return optax.EmptyState()

        def update(updates: Params, state: optax.OptState, params: Params | None = None):
            del params
            trained = self._trained(updates)
            zeroed = jax.tree.map(lambda u, k: u if k else jnp.zeros_like(u), updates, trained)
            return zeroed, state

        return optax.GradientTransformation(init, update)

    def _trained(self, tree: Tree) -> Tree:
        return _map_named(lambda name, _: not self._group(name).freeze, tree)

    def _factor_of(self, name: str, leaf: Leaf) -> float:
        del leaf
        return self._group(name).lr

    def _decay_of(self, dims: NamedDims, name: str, leaf: Leaf) -> float:
        of_group = self._group(name).weight_decay
        if of_group is not None:
            return of_group
        named = any(matches(name, pattern) for pattern in self.decay)
        matrix = not self.decay and layer_ndim(name, leaf, dims) >= 2
        return self.weight_decay if named or matrix else 0.0

    def _group(self, name: str) -> ParamGroup:
        return group_of(name, self.groups) or ParamGroup(match="*")


def _by_name(
    change: Callable[[Leaf, Leaf, float], Leaf], number: Callable[[str, Leaf], float]
) -> optax.GradientTransformation:
    """`change(update, param, number(name, param))` of each leaf; no state."""

    def update(updates: Params, params: Params | None) -> Params:
        if params is None:
            raise ConfigError("decay and groups need the parameters: update(grads, state, params).")
        return _map_named(lambda name, u, p: change(u, p, number(name, p)), updates, params)

    return optax.stateless(update)


def _map_named(function: Callable[..., Any], *all_trees: Any) -> Any:
    return jax.tree_util.tree_map_with_path(
        lambda path, *leaves: function(pytree.name(path), *leaves), *all_trees
    )
