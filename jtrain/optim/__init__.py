"""Optimizers: configs with `build(steps)` and `learning_rate(steps)`."""

from typing import Annotated, TypeAlias

from jtrain.config.registry import Registry
from jtrain.io.lazy_names import lazy_names
from jtrain.optim.adafactor import Adafactor as Adafactor
from jtrain.optim.adam import Adam as Adam
from jtrain.optim.adam import AdamW as AdamW
from jtrain.optim.adam import Lamb as Lamb
from jtrain.optim.adam import NAdamW as NAdamW
from jtrain.optim.by_name import Optax as Optax
from jtrain.optim.evaluation import WithEvalParams as WithEvalParams
from jtrain.optim.evaluation import evaluation_params as evaluation_params
from jtrain.optim.groups import ParamGroup as ParamGroup
from jtrain.optim.join import Join as Join
from jtrain.optim.join import SchedulePiece as SchedulePiece
from jtrain.optim.lbfgs import LBFGS as LBFGS
from jtrain.optim.muon import Muon as Muon
from jtrain.optim.recipe import OptimizerConfig as OptimizerConfig
from jtrain.optim.schedule_free import ScheduleFree as ScheduleFree
from jtrain.optim.schedules import Constant as Constant
from jtrain.optim.schedules import Cosine as Cosine
from jtrain.optim.schedules import Exponential as Exponential
from jtrain.optim.schedules import InverseSquareRoot as InverseSquareRoot
from jtrain.optim.schedules import LinearSchedule as LinearSchedule
from jtrain.optim.schedules import OneCycle as OneCycle
from jtrain.optim.schedules import Restarts as Restarts
from jtrain.optim.schedules import ScheduleBase as ScheduleBase
from jtrain.optim.schedules import WarmupStableDecay as WarmupStableDecay
from jtrain.optim.sgd import SGD as SGD
from jtrain.optim.sgd import Lion as Lion

Optimizer: TypeAlias = Annotated[
    SGD | Adam | AdamW | NAdamW | Lamb | Adafactor | Lion | Muon | ScheduleFree | LBFGS | Optax,
    Registry("optimizers", OptimizerConfig, "rule"),
]

_, __dir__ = lazy_names(__name__)
