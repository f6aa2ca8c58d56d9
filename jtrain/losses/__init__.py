"""Losses: functions of model outputs that return Means; `jt.losses.cross_entropy(...)`."""

from jtrain.losses.accuracy import accuracy
from jtrain.losses.balance import balance, with_router
from jtrain.losses.binary_cross_entropy import binary_cross_entropy
from jtrain.losses.calibration import calibration, expected_calibration_error
from jtrain.losses.chunked_next_token import chunked_next_token
from jtrain.losses.confusion import confusion
from jtrain.losses.contrastive import contrastive
from jtrain.losses.cross_entropy import cross_entropy
from jtrain.losses.distillation import distillation
from jtrain.losses.elbo import elbo
from jtrain.losses.huber import huber
from jtrain.losses.next_token import next_token
from jtrain.losses.perplexity import perplexity
from jtrain.losses.soft_cross_entropy import soft_cross_entropy
from jtrain.losses.squared_error import squared_error
from jtrain.losses.z_loss import z_loss

__all__ = [
    "accuracy",
    "balance",
    "binary_cross_entropy",
    "calibration",
    "chunked_next_token",
    "confusion",
    "contrastive",
    "cross_entropy",
    "distillation",
    "elbo",
    "expected_calibration_error",
    "huber",
    "next_token",
    "perplexity",
    "soft_cross_entropy",
    "squared_error",
    "with_router",
    "z_loss",
]
