"""Optimizers of optax and optax.contrib by their names."""

import functools
import inspect
from collections.abc import Callable, Mapping
from typing import Any, Literal

import optax
import optax.contrib
from pydantic import Field, model_validator

from jtrain.config.configclass import configclass
from jtrain.errors.spelling import did_you_mean
from jtrain.optim.recipe import OptimizerConfig
from jtrain.optim.schedules import LearningRate

CONTRIB = "contrib."
OWN = {"contrib.schedule_free": "schedule_free", "lbfgs": "lbfgs"}  # need more than a gradient


@configclass
class Optax(OptimizerConfig):
    """Any optimizer of optax that takes a learning rate, such as `rmsprop` or `contrib.prodigy`.

    Clipping, groups, frozen leaves and `ema` are those of every optimizer; `args` has the rest. A
    stack of layers is one leaf to it.
    """

    kind: Literal["optax"] = "optax"
    name: str
    """Its name in optax: `rmsprop`, `adabelief`, `contrib.prodigy`."""
    args: dict[str, Any] = Field(default_factory=dict)
    """Its other arguments: {decay: 0.9, momentum: 0.9}. Weight decay is one of them."""

    @model_validator(mode="after")
    def _check(self) -> "Optax":
        known = optax_optimizers()
        for start, kind in OWN.items():
            if self.name.startswith(start):
                raise ValueError(f"{self.name} is kind {kind} here: write optimizer.kind={kind}")
        if self.name not in known:
            near = did_you_mean(self.name, known) or f"; it has {', '.join(known)}"
            raise ValueError(f"name: optax has no optimizer {self.name!r}{near}")
        if self.weight_decay or any(group.weight_decay for group in self.groups):
            raise ValueError(
                "weight_decay is an argument of the optimizer of optax, if it has one: write "
                "optimizer.args={weight_decay: 0.1}"
            )
        takes = [x for x in inspect.signature(known[self.name]).parameters if x != "learning_rate"]
        for name in self.args:
            if name not in takes:
                near = did_you_mean(name, takes)
                raise ValueError(f"args: {self.name} takes {', '.join(takes)}, not {name}{near}")
        return self

    def rule(self, decay: optax.GradientTransformation) -> optax.GradientTransformation:
        """Return the gradient: `descent` has the rule, with the learning rate in it."""
        del decay
        return optax.identity()

    def descent(
        self,
        rule: optax.GradientTransformation,
        scale: optax.GradientTransformation,
        rate: LearningRate,
    ) -> optax.GradientTransformation:
        """Return the optimizer of optax, then the factors of the groups."""
        del rule, scale
        made = optax_optimizers()[self.name](learning_rate=rate, **self.args)
        return optax.chain(made, *self._factors())


@functools.cache
def optax_optimizers() -> Mapping[str, Callable[..., optax.GradientTransformation]]:
    """Return the functions of optax and optax.contrib that make an optimizer of a learning rate."""
    modules = {"": optax, CONTRIB: optax.contrib}
    functions = {p + name: x for p, module in modules.items() for name, x in vars(module).items()}
    return {
        name: function
        for name, function in sorted(functions.items())
        if inspect.isfunction(function)
        and not name.rpartition(".")[2].startswith(("_", "scale_by_"))
        and "learning_rate" in inspect.signature(function).parameters
    }
