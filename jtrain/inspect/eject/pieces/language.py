"""The loss of a language model without experts."""

from jtrain.inspect.eject.pieces.chunked_next_token import language_loss


def loss(params, extra, batch, key):
    """Return the terms (coefficient, sum, weight) of the loss, and what the model carries on."""
    nats, _, _ = language_loss(params, batch, key)
    return [(1.0, *nats)], extra
