"""Base config of every `parallel` kind: the start of the processes."""

from pydantic import Field

from jtrain.config.configclass import configclass


@configclass
class BaseParallelConfig:
    """Fields of every kind of `parallel`."""

    start_timeout: float = Field(default=300.0, gt=0)
    """Seconds that the processes of a run wait for one another when they start."""
