"""Perplexity of a language model."""

import math

from jtrain.core.mean import Mean


def perplexity(nats: Mean | float) -> float:
    """Return exp of the mean nats, on the host; wait for the device.

    Compute it from the mean over all tokens: the mean of the perplexities of batches is not the
    perplexity of all. So runs log and evaluate the loss, in nats.
    """
    mean = nats.value() if isinstance(nats, Mean) else nats
    return math.exp(mean) if mean < 709 else math.inf  # beyond, float64 has no number for it
