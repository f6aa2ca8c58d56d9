"""Learning-rate schedules: configs with `build(peak, steps)`, one curve a file.

Steps count from 0. During a warmup of `w` steps the rate is peak x (step + 1) / (w + 1), so that no
step is wasted at a rate of 0, and step `w` is the first at the peak. Where a curve has a `final`,
the last step, `steps - 1`, has the rate `final` x peak exactly, and later steps of a resumed run
keep that rate. A schedule is as long as the run, unless it has `steps` of its own.
"""

from typing import Annotated, TypeAlias

from pydantic import Field

from jtrain.optim.schedules.cosine import Cosine as Cosine
from jtrain.optim.schedules.cosine import OneCycle as OneCycle
from jtrain.optim.schedules.cosine import Restarts as Restarts
from jtrain.optim.schedules.join import Join as Join
from jtrain.optim.schedules.join import SchedulePiece as SchedulePiece
from jtrain.optim.schedules.rate import LearningRate as LearningRate
from jtrain.optim.schedules.simple import Constant as Constant
from jtrain.optim.schedules.simple import Exponential as Exponential
from jtrain.optim.schedules.simple import InverseSquareRoot as InverseSquareRoot
from jtrain.optim.schedules.simple import LinearSchedule as LinearSchedule
from jtrain.optim.schedules.simple import WarmupStableDecay as WarmupStableDecay

Schedule: TypeAlias = Annotated[
    Constant
    | LinearSchedule
    | Cosine
    | WarmupStableDecay
    | InverseSquareRoot
    | OneCycle
    | Restarts
    | Join
    | Exponential,
    Field(discriminator="kind"),
]
