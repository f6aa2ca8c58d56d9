"""One dial: the steps, batch and rates of a run by the size of its transformer.

The exponents are published. The constants belong to the data: a run that was tuned, a `Reference`.
"""

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

RATES = ("adamw", "muon")  # optimizers whose steps have a root mean square of about the rate


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
    """Tokens of a run for each parameter in its blocks. Compute-optimal are 10.5 with those of the
    head, as nanochat measured, and 20 of all (Hoffmann et al. 2022)."""

    def tokens(self, layers: int, width: int) -> int:
        """Return the tokens of a run; blocks have 12 layers width^2 parameters (Kaplan et al. 2020,
        https://arxiv.org/abs/2001.08361, section 2.1)."""
        return round(self.tokens_per_parameter * 12 * layers * width**2)


CHARACTERS = Reference(layers=4, width=64, batch=768, lr=1e-2, weight_decay=0.1)
"""Measured on the plays of Shakespeare: docs/models.md#one-dial."""
GPT2 = Reference(layers=12, width=768, batch=2**19, lr=6e-4, weight_decay=0.1)
"""nanoGPT's reproduction, https://github.com/karpathy/nanoGPT (config/train_gpt2.py)."""


def imply_training(config: Any, reference: Reference) -> Mapping[str, Any]:
    """Return by dotted key what the size of the model implies for its run.

    For a run on D tokens in batches of B tokens

    - B ~ D^0.383 (Bergsma et al. 2025, https://arxiv.org/abs/2505.13738), a power of two of rows,
    - rate ~ (B / width)^(1/2): of the batch by Malladi et al. 2022,
      https://arxiv.org/abs/2205.10287, of the width as nanochat has it,
      https://github.com/karpathy/nanochat (scripts/base_train.py, 2026-07),
    - weight decay ~ B^(1/2) / D, which keeps its time constant the same share of the run (Wang and
      Aitchison 2024, https://arxiv.org/abs/2405.13698).

    Args:
        config: an experiment's, with `model` (a Transformer), `data.context` (tokens a row),
            `batch` (rows, which the rates follow) and `optimizer` (not of `RATES`: no rates).
        reference: a tuned run on data of this kind.
    """
    layers, width, context = config.model.layers, config.model.width, config.data.context
    tokens = reference.tokens(layers, width)
    more = tokens / reference.tokens(reference.layers, reference.width)
    rows = reference.batch * more**0.383 / context
    values: dict[str, Any] = {"steps": f"{tokens} tokens"}
    values["batch"] = 2 ** max(round(math.log2(rows)), 0)
    if config.optimizer.kind in RATES:
        root = math.sqrt(config.batch * context / reference.batch)
        rate = reference.lr * root * math.sqrt(reference.width / width)
        values["optimizer.lr"] = float(f"{rate:.4g}")
        values["optimizer.weight_decay"] = float(f"{reference.weight_decay * root / more:.4g}")
    return values
