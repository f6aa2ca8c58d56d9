"""The base of schedules: their length, by default that of the run."""

import abc
from typing import Annotated

from jtrain.config.configclass import configclass
from jtrain.config.durations import DurationField, OwnSteps
from jtrain.errors import ConfigError
from jtrain.optim.schedules.rate import LearningRate


@configclass
class ScheduleBase(OwnSteps, abc.ABC):
    """A curve of the learning rate, which a subclass defines by `rate`."""

    steps: Annotated[int, DurationField(0, "%")] = 0
    """Length of the schedule in steps, or 3 epochs, or 100% of the run; then the rate stays.
    0: the steps of the run when it started, however long it is trained."""

    def build(self, peak: float, steps: int) -> LearningRate:
        """Return the rate at each step of a run of `steps`.

        Raises:
            ConfigError: if the schedule does not fit its length.
        """
        try:
            return self.rate(peak, self.steps or steps)
        except ConfigError as error:
            if not self.steps:
                raise
            # The message of `rate` is about the run's `steps=N`.
            own = str(error).replace("steps=", "optimizer.schedule.steps=")
            raise ConfigError(f"optimizer.schedule.steps {self.steps}: {own}") from None

    @abc.abstractmethod
    def rate(self, peak: float, steps: int) -> LearningRate:
        """Return the rate at each step of a schedule of `steps`.

        Raises:
            ConfigError: if the schedule does not fit that length.
        """
