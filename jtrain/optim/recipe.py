"""What every optimizer has around its rule: clipping, decay, groups, and the rate over the run."""

import abc
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from pydantic import Field

from jtrain import trees
from jtrain.errors import ConfigError
from jtrain.optim.groups import Group, check_patterns, group_of, matches
from jtrain.optim.schedules import Constant, LearningRate, Schedule
from jtrain.types import Leaf, Params, Tree
from jtrain.values import values


@values
class Recipe(abc.ABC):
    """An optimizer but for its rule, which a member gives by `rule`.

    The gradients arrive summed over devices and microbatches. In order: those of frozen leaves are
    dropped, the rest is clipped by its norm, the rule turns it into a direction (weight decay comes
    in where the rule wants it), and the learning rate and the group's factor scale it.
    """

    lr: float = Field(gt=0)
    """Peak learning rate."""
    schedule: Schedule = Field(default_factory=Constant)
    """How the learning rate goes over the run: constant, linear, cosine or wsd."""
    clip: float = Field(default=0.0, ge=0)
    """Largest norm of the whole gradient, frozen leaves left out; 0 clips nothing."""
    weight_decay: float = Field(default=0.0, ge=0)
    """Decay of the weights that `decay` names, before the learning rate scales it."""
    decay: tuple[str, ...] = ()
    """Patterns of the leaves that decay; empty means every leaf of two or more dims, which leaves
    out biases and scales of norms (unless layers are stacked in a leading dim: then name them)."""
    groups: tuple[Group, ...] = ()
    """Leaves with a learning rate, a decay, or a rest of their own; the first match counts."""

    @abc.abstractmethod
    def rule(self, decay: optax.GradientTransformation) -> optax.GradientTransformation:
        """Gradient -> ascent direction of unit learning rate, with `decay` where it belongs."""

    def learning_rate(self, steps: int) -> LearningRate:
        """The rate at each step (from 0) of a run of `steps`.

        Raises:
            ConfigError: if the warmup leaves no step.
        """
        return self.schedule.build(self.lr, steps)

    def build(self, steps: int) -> optax.GradientTransformation:
        """The transformation for a run of `steps`; its `init` raises where a pattern fits no leaf.

        Raises:
            ConfigError: if the warmup leaves no step.
        """
        rule = self.rule(_by_name(lambda u, p, decay: u + decay * p, self._decay_of))
        if any(group.freeze for group in self.groups):
            rule = optax.masked(rule, self._trained)
        stages = [self._chosen(), rule]
        if self.clip:
            stages.insert(1, optax.clip_by_global_norm(self.clip))
        if any(group.lr != 1 for group in self.groups):
            stages.append(_by_name(lambda u, _, factor: u * factor, self._factor_of))
        return optax.chain(*stages, optax.scale_by_learning_rate(self.learning_rate(steps)))

    def _chosen(self) -> optax.GradientTransformation:
        """Gradients of frozen leaves set to zero; `init` checks every pattern."""

        def init(params: Params) -> optax.EmptyState:
            check_patterns(trees.named_leaves(params), self.groups, self.decay)
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

    def _decay_of(self, name: str, leaf: Leaf) -> float:
        of_group = self._group(name).weight_decay
        if of_group is not None:
            return of_group
        named = any(matches(name, pattern) for pattern in self.decay)
        return self.weight_decay if named or (not self.decay and leaf.ndim >= 2) else 0.0

    def _group(self, name: str) -> Group:
        return group_of(name, self.groups) or Group(match="*")


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
        lambda path, *leaves: function(trees.name(path), *leaves), *all_trees
    )
