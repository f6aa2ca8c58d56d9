"""How the processes of a run come together: of every way to split it."""

from pydantic import Field

from jtrain.config.configclass import configclass


@configclass
class BaseParallelConfig:
    """Values that every kind of `parallel` has."""

    start_timeout: float = Field(default=300.0, gt=0)
    """Seconds that the processes of a run wait for one another when they start."""
