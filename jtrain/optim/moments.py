"""Config fields of optimizers with running means of gradients and of their squares."""

from pydantic import Field

from jtrain.config.configclass import configclass
from jtrain.optim.recipe import OptimizerConfig


@configclass
class Moments(OptimizerConfig):
    """The decay rates of both means, and the epsilon of their quotient."""

    b1: float = Field(default=0.9, ge=0, lt=1)
    """Decay rate of the running mean of gradients."""
    b2: float = Field(default=0.999, ge=0, lt=1)
    """Decay rate of the running mean of squared gradients; 0.95 is usual for text."""
    eps: float = Field(default=1e-8, gt=0)
    """Number added to the root of the mean square, so that nothing is divided by zero."""
