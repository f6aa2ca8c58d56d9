"""Losses: functions of model outputs that return Means; `jt.losses.cross_entropy(...)`."""

from jtrain.losses.accuracy import accuracy, calibration, confusion, expected_calibration_error
from jtrain.losses.balance import balance, with_router, z_loss
from jtrain.losses.chunked_next_token import chunked_next_token
from jtrain.losses.contrastive import contrastive
from jtrain.losses.cross_entropy import (
    binary_cross_entropy,
    cross_entropy,
    distillation,
    soft_cross_entropy,
)
from jtrain.losses.elbo import elbo
from jtrain.losses.next_token import next_token, perplexity
from jtrain.losses.squared_error import huber, squared_error

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
