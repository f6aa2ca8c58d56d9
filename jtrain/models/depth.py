"""One dial: the steps, batch and rates of a run by the size of its transformer.

The exponents are published. The constants belong to the data: a run that was tuned, a `Reference`.
"""

import dataclasses
import math
from collections.abc import Callable, Mapping
from typing import Any

RATES = ("adamw", "muon")  # optimizers whose steps have the root mean square of AdamW's


@dataclasses.dataclass(frozen=True)
class Reference:
    """The values of a tuned run, from which those of others follow."""

    layers: int
    width: int
    batch: int
    """Tokens a step."""
    lr: float
    weight_decay: float
    tokens_per_parameter: float = 10
    """Tokens of a run over 12 layers width^2, the parameters of its blocks (of GPT-2's kind; Kaplan
    et al. 2020, https://arxiv.org/abs/2001.08361, section 2.1). nanochat measured 10.5 as
    compute-optimal, of block and head parameters; Hoffmann et al. 2022 20, of all."""

    def tokens(self, layers: int, width: int) -> int:
        """Return the tokens of a run."""
        return round(self.tokens_per_parameter * 12 * layers * width**2)


CHARACTERS = Reference(layers=4, width=64, batch=768, lr=1e-2, weight_decay=0.1)
"""Measured on the plays of Shakespeare, in nats of validation. Depth 3: batches of 4, 8, 16, 32 and
64 rows of 64 gave 1.724, 1.712, 1.730, 1.770, 1.876 at the best rate of each. Depth 4: 8 rows at
0.007, 0.01 and 0.014 gave 1.535, 1.542, 1.559, 16 rows at 0.01 1.535. The batch lies between."""
GPT2 = Reference(layers=12, width=768, batch=2**19, lr=6e-4, weight_decay=0.1)
"""nanoGPT's reproduction, https://github.com/karpathy/nanoGPT (config/train_gpt2.py)."""


def imply_training(
    config: Any, given: Callable[[str], Any], reference: Reference
) -> Mapping[str, Any]:
    """Return by dotted key what the size of the model implies for its run.

    For a run on D tokens in batches of B tokens, by nanochat's rules (scripts/base_train.py of
    https://github.com/karpathy/nanochat, 2026-07):

    - B ~ D^0.383 (Bergsma et al. 2025, https://arxiv.org/abs/2505.13738), a power of two of rows,
    - rate ~ (B / width)^(1/2) (of the batch: Malladi et al. 2022, https://arxiv.org/abs/2205.10287).
      There Muon's rate has no width, but its steps are orthogonal matrices, which shrink by the
      root of the width; here they have AdamW's root mean square at every width,
    - weight decay ~ B^(1/2) / D (Wang and Aitchison 2024, https://arxiv.org/abs/2405.13698).

    Args:
        config: an experiment's, with `model` (a Transformer), `data.context` (tokens a row),
            `batch` (rows) and `optimizer` (not of `RATES`: no rates).
        given: whether a dotted key was given. Rates follow a given batch; D stays what is implied.
        reference: a tuned run on data of this kind.
    """
    layers, width, context = config.model.layers, config.model.width, config.data.context
    tokens = reference.tokens(layers, width)
    token_ratio = tokens / reference.tokens(reference.layers, reference.width)
    rows = 2 ** max(round(math.log2(reference.batch * token_ratio**0.383 / context)), 0)
    values: dict[str, Any] = {"steps": f"{tokens} tokens", "batch": rows}
    if config.optimizer.kind in RATES:
        batch = context * (config.batch if given("batch") else rows)
        batch_scale = math.sqrt(batch / reference.batch)
        rate = reference.lr * batch_scale * math.sqrt(reference.width / width)
        decay = reference.weight_decay * batch_scale / token_ratio
        values["optimizer.lr"] = float(f"{rate:.4g}")
        values["optimizer.weight_decay"] = float(f"{decay:.4g}")
    return values
