"""Losses: functions of model outputs that return Means; `jt.losses.cross_entropy(...)`."""

from jtrain.io.lazy_names import lazy_names
from jtrain.losses.balance import balance as balance
from jtrain.losses.balance import max_violation as max_violation
from jtrain.losses.balance import with_router as with_router
from jtrain.losses.balance import z_loss as z_loss
from jtrain.losses.calibration import calibration as calibration
from jtrain.losses.calibration import expected_calibration_error as expected_calibration_error
from jtrain.losses.chunked_next_token import chunked_next_token as chunked_next_token
from jtrain.losses.contrastive import contrastive as contrastive
from jtrain.losses.contrastive import info_nce as info_nce
from jtrain.losses.cross_entropy import binary_cross_entropy as binary_cross_entropy
from jtrain.losses.cross_entropy import cross_entropy as cross_entropy
from jtrain.losses.cross_entropy import distillation as distillation
from jtrain.losses.cross_entropy import soft_cross_entropy as soft_cross_entropy
from jtrain.losses.elbo import elbo as elbo
from jtrain.losses.elbo import latents as latents
from jtrain.losses.group_policy import advantages_by_row as advantages_by_row
from jtrain.losses.group_policy import dapo as dapo
from jtrain.losses.group_policy import dr_grpo as dr_grpo
from jtrain.losses.group_policy import group_advantages as group_advantages
from jtrain.losses.group_policy import grpo as grpo
from jtrain.losses.group_policy import gspo as gspo
from jtrain.losses.metrics import accuracy as accuracy
from jtrain.losses.metrics import confusion as confusion
from jtrain.losses.next_token import inputs_and_targets as inputs_and_targets
from jtrain.losses.next_token import multi_token as multi_token
from jtrain.losses.next_token import next_token as next_token
from jtrain.losses.next_token import perplexity as perplexity
from jtrain.losses.next_token import segments_of as segments_of
from jtrain.losses.next_token import token_divergence as token_divergence
from jtrain.losses.preferences import dpo as dpo
from jtrain.losses.preferences import ipo as ipo
from jtrain.losses.preferences import kto as kto
from jtrain.losses.preferences import response_log_probs as response_log_probs
from jtrain.losses.preferences import token_log_probs as token_log_probs
from jtrain.losses.squared_error import huber as huber
from jtrain.losses.squared_error import squared_error as squared_error

_, __dir__ = lazy_names(__name__)
