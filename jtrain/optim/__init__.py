"""Optimizers: values with `build(steps)` and `learning_rate(steps)`."""

from typing import Annotated, TypeAlias

from pydantic import Field

from jtrain.optim.adam import Adam as Adam
from jtrain.optim.adamw import AdamW as AdamW
from jtrain.optim.groups import Group as Group
from jtrain.optim.schedules import Constant as Constant
from jtrain.optim.schedules import Cosine as Cosine
from jtrain.optim.schedules import Linear as Linear
from jtrain.optim.schedules import WarmupStableDecay as WarmupStableDecay
from jtrain.optim.sgd import SGD as SGD

Optimizer: TypeAlias = Annotated[SGD | Adam | AdamW, Field(discriminator="kind")]
