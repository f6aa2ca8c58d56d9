"""A perceptron that classifies."""

from jtrain.inspect.eject.pieces.mlp import init_mlp, mlp

SIZES: tuple[int, ...] = (64, 512, 256, 10)  # inputs, hidden layers, classes


def init_model(key):
    """Return the parameters, and what else the model carries."""
    return init_mlp(key, SIZES), {}


def model(params, extra, batch, keys):
    """Return the logits of each row."""
    return mlp(params, batch["image"], keys), extra
