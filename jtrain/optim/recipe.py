"""The base config of optimizers: clipping, decay, groups and learning rate around a rule."""

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
from jtrain.config.registry import Kind
from jtrain.core import pytree
from jtrain.core.types import Dims, Leaf, Params, Tree
from jtrain.errors import ConfigError
from jtrain.optim.evaluation import chain_before, with_average
from jtrain.optim.groups import ParamGroup, check_patterns, group_of, layer_ndim, matches
from jtrain.optim.join import Schedule
from jtrain.optim.schedules import Constant, LearningRate
from jtrain.optim.transformations import by_parts, clip_by_norm, freeze_others

NamedDims: TypeAlias = Mapping[str, Dims]  # by parameter, as in `Model.dims`
NO_NAMES: NamedDims = MappingProxyType({})


@configclass
class OptimizerConfig(Kind, abc.ABC):
    """An optimizer without its rule, which a subclass defines by `rule`.

    The gradients are summed over devices and microbatches. In order: gradients of frozen leaves are
    dropped, the rest is clipped, by value and then by norm, the rule turns the gradients into a
    direction (with weight decay where the rule adds it), and the learning rate and the group's
    factor scale the direction. A complex leaf takes the steps of its real and its imaginary part,
    as in PyTorch; clipping by norm takes its modulus.
    """

    lr: float = Field(gt=0)
    """Peak learning rate."""
    schedule: Schedule = Field(default_factory=Constant)
    """Schedule of the learning rate over the run."""
    clip: float = Field(default=0.0, ge=0)
    """Largest norm of the gradient over all leaves that are not frozen; 0: no clipping."""
    clip_value: float = Field(default=0.0, ge=0)
    """Largest size of each number of the gradient, clipped before the norm; 0: no clipping."""
    weight_decay: float = Field(default=0.0, ge=0)
    """Weight decay of the leaves that `decay` names, before the learning rate scales it."""
    decay: tuple[str, ...] = ()
    """Patterns of the leaves that decay; empty: every leaf of two or more dims, so no biases and
    scales of norms. A leading dim in which layers are stacked does not count."""
    groups: tuple[ParamGroup, ...] = ()
    """Leaves with their own learning rate or decay, or frozen; the first match counts."""
    ema: float = Field(default=0.0, ge=0, lt=1)
    """Decay rate of a running average of the parameters, such as 0.999; evaluation and samples use
    the average. 0: no average."""

    @abc.abstractmethod
    def rule(self, decay: optax.GradientTransformation) -> optax.GradientTransformation:
        """Return gradient -> ascent direction at a learning rate of 1, with `decay` applied."""

    def layered_rule(
        self, decay: optax.GradientTransformation, dims: NamedDims
    ) -> optax.GradientTransformation:
        """Return the rule for leaves some of which stack layers, according to `dims`.

        Override the method if the rule depends on the norm or the number of dims of a leaf: a stack
        then takes the steps of its layers.
        """
        del dims
        return self.rule(decay)

    def learning_rate(self, steps: int) -> LearningRate:
        """Return the rate at each step (from 0) of a run of `steps`.

        Raises:
            ConfigError: if the warmup leaves no step.
        """
        return self.schedule.build(self.lr, steps)

    def build(
        self, steps: int, dims: NamedDims = NO_NAMES, *, lr_factor: LearningRate | None = None
    ) -> optax.GradientTransformation:
        """Build the transformation of a run of `steps`; `init` raises if a pattern has no leaf.

        Args:
            steps: of the whole run, for the schedule.
            dims: the names of the parameters' dims, `Model.dims`. A leading dim `layers` is a stack
                of layers, each of which takes the steps of a separate leaf.
            lr_factor: factor of the learning rate at each step, from 0; None: 1.

        Raises:
            ConfigError: if the warmup leaves no step.
        """
        if isinstance(steps, Duration):
            raise TypeError(f"{steps} is not counted in steps yet: write optimizer=self.optimizer")
        rate = scaled(self.learning_rate(steps), lr_factor)
        decay = _by_name(lambda u, p, decay: u + decay * p, functools.partial(self._decay_of, dims))
        optimizer = self.descent(self.layered_rule(decay, dims), self._scale(rate), rate)
        if self.ema:
            optimizer = with_average(optimizer, self.ema)
        if self.freezes:
            optimizer = freeze_others(optimizer, self.trained)
        return chain_before(optax.chain(*self._before(dims)), optimizer)

    def descent(
        self,
        rule: optax.GradientTransformation,
        scale: optax.GradientTransformation,
        rate: LearningRate,
    ) -> optax.GradientTransformation:
        """Return gradient -> update: the rule, then `scale` by minus the rate and the factors."""
        del rate
        return by_parts(optax.chain(rule, scale))

    def check(self, leaves: Mapping[str, Leaf], dims: NamedDims = NO_NAMES) -> None:
        """Raise unless these values suit the leaves.

        Raises:
            ConfigError: if a pattern has no effect.
        """
        del dims
        check_patterns(leaves, self.groups, self.decay)

    @property
    def freezes(self) -> bool:
        """Whether a group is frozen."""
        return any(group.freeze for group in self.groups)

    def trained(self, tree: Tree) -> Tree:
        """Return a tree of the structure of the parameters: False for each leaf that is frozen."""
        return _map_named(lambda name, _: not self._group(name).freeze, tree)

    def _before(self, dims: NamedDims) -> list[optax.GradientTransformation]:
        stages = [self._freeze(dims)]
        if self.clip_value:
            stages.append(by_parts(optax.clip(self.clip_value)))
        if self.clip:
            stages.append(clip_by_norm(self.clip))
        return stages

    def _scale(self, rate: LearningRate) -> optax.GradientTransformation:
        by_rate, factors = optax.scale_by_learning_rate(rate), self._factors()
        return optax.chain(*factors, by_rate) if factors else by_rate

    def _factors(self) -> list[optax.GradientTransformation]:
        if all(group.lr_factor == 1 for group in self.groups):
            return []
        return [_by_name(lambda u, _, factor: u * factor, self._factor_of)]

    def _freeze(self, dims: NamedDims) -> optax.GradientTransformation:
        """Set the gradients of frozen leaves to zero; `init` checks every pattern."""

        def init(params: Params) -> optax.EmptyState:
            self.check(pytree.named_leaves(params), dims)
            return optax.EmptyState()

        def update(updates: Params, state: optax.OptState, params: Params | None = None):
            del params
            marks = self.trained(updates)
            zeroed = jax.tree.map(lambda u, k: u if k else jnp.zeros_like(u), updates, marks)
            return zeroed, state

        return optax.GradientTransformation(init, update)

    def _factor_of(self, name: str, leaf: Leaf) -> float:
        del leaf
        return self._group(name).lr_factor

    def _decay_of(self, dims: NamedDims, name: str, leaf: Leaf) -> float:
        group_decay = self._group(name).weight_decay
        if group_decay is not None:
            return group_decay
        named = any(matches(name, pattern) for pattern in self.decay)
        matrix = not self.decay and layer_ndim(name, leaf, dims) >= 2
        return self.weight_decay if named or matrix else 0.0

    def _group(self, name: str) -> ParamGroup:
        return group_of(name, self.groups) or ParamGroup(match="*")


def scaled(rate: LearningRate, factor: LearningRate | None) -> LearningRate:
    """Return the learning rate times a factor at each step; None: the rate itself."""
    return rate if factor is None else lambda step: rate(step) * factor(step)


def _by_name(
    change: Callable[[Leaf, Leaf, float], Leaf], number: Callable[[str, Leaf], float]
) -> optax.GradientTransformation:
    """Apply `change(update, param, number(name, param))` to each leaf, without state."""

    def update(updates: Params, params: Params | None) -> Params:
        if params is None:
            raise ConfigError("decay and groups need the parameters: update(grads, state, params).")
        return _map_named(lambda name, u, p: change(u, p, number(name, p)), updates, params)

    return optax.stateless(update)


def _map_named(function: Callable[..., Any], *all_trees: Any) -> Any:
    return jax.tree_util.tree_map_with_path(
        lambda path, *leaves: function(pytree.name(path), *leaves), *all_trees
    )
