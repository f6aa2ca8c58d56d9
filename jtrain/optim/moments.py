"""The values of every optimizer that keeps means of gradients and of their squares."""

from pydantic import Field

from jtrain.config.configclass import configclass
from jtrain.optim.recipe import OptimizerConfig


@configclass
class Moments(OptimizerConfig):
    """The two means and what their quotient needs."""

    b1: float = Field(default=0.9, ge=0, lt=1)
    """Share of the running mean of gradients that is kept each step."""
    b2: float = Field(default=0.999, ge=0, lt=1)
    """Share of the running mean of their squares that is kept each step; 0.95 is usual for text."""
    eps: float = Field(default=1e-8, gt=0)
    """Added to the root of that mean, so that nothing is divided by zero."""
