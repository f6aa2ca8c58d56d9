"""How many equally likely choices a model is as unsure as."""

import math

from jtrain.core.mean import Mean


def perplexity(nats: Mean | float) -> float:
    """exp of the mean nats, on the host; waits for the device.

    To be taken of the whole, when all is added up: the mean of the perplexities of parts is not the
    perplexity of the whole. What is logged and evaluated is therefore the loss, in nats.
    """
    mean = nats.value() if isinstance(nats, Mean) else nats
    return math.exp(mean) if mean < 709 else math.inf  # beyond, float64 has no number for it
