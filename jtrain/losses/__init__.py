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
from jtrain.losses.group_policy import (
    advantages_by_row,
    dapo,
    dr_grpo,
    group_advantages,
    grpo,
    gspo,
)
from jtrain.losses.info_nce import info_nce
from jtrain.losses.next_token import next_token, perplexity
from jtrain.losses.preferences import dpo, ipo, kto, response_log_probs, token_log_probs
from jtrain.losses.squared_error import huber, squared_error
from jtrain.losses.token_divergence import token_divergence

__all__ = [
    "accuracy",
    "advantages_by_row",
    "balance",
    "binary_cross_entropy",
    "calibration",
    "chunked_next_token",
    "confusion",
    "contrastive",
    "cross_entropy",
    "dapo",
    "distillation",
    "dpo",
    "dr_grpo",
    "elbo",
    "expected_calibration_error",
    "group_advantages",
    "grpo",
    "gspo",
    "huber",
    "info_nce",
    "ipo",
    "kto",
    "next_token",
    "perplexity",
    "response_log_probs",
    "soft_cross_entropy",
    "squared_error",
    "token_divergence",
    "token_log_probs",
    "with_router",
    "z_loss",
]
