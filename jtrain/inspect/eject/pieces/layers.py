"""Layers of several networks: linear maps and dropout by row."""

import jax
import jax.numpy as jnp

DROPOUT: float = 0.2
BF16: bool = False


class Draws:
    """Keys of the parameters, one after the other."""

    def __init__(self, key):
        self.key, self.count = key, 0

    def normal(self, shape, std):
        """Return normal numbers of a deviation, by the next key."""
        key = jax.random.fold_in(self.key, self.count)
        self.count += 1
        return std * jax.random.normal(key, shape)


def init_linear(draws, inputs, outputs, std, *, bias=True):
    """Return a linear map. The kernel is stored (narrow, wide): the faster way for its gradient."""
    kernel = draws.normal((min(inputs, outputs), max(inputs, outputs)), std)
    return {"kernel": kernel, "bias": jnp.zeros(outputs)} if bias else {"kernel": kernel}


def linear(layer, x):
    """Apply a linear map at each position."""
    rows, kernel = x.reshape(-1, x.shape[-1]), layer["kernel"]
    inputs = 0 if kernel.shape[0] == x.shape[-1] else 1
    y = jax.lax.dot_general(rows, kernel, (((1,), (inputs,)), ((), ())))
    if "bias" in layer:
        y = y + layer["bias"].reshape(1, -1)
    return y.reshape(*x.shape[:-1], -1)


def drop(x, keys, site):
    """Zero numbers at random and scale the others. A row draws by its own key, so its mask depends
    on no other row and no device; `site` numbers the calls in a model."""

    def mask(key):
        return jax.random.bernoulli(jax.random.fold_in(key, site), 1 - DROPOUT, x.shape[1:])

    return jnp.where(jax.vmap(mask)(keys), x / (1 - DROPOUT), jnp.zeros((), x.dtype))


@jax.custom_vjp
def add_positions(x, positions):
    """Return `x` plus a vector for each position."""
    return x + positions[None]


def add_positions_backward(_, grad):
    """Sum over the rows in float32."""
    flat = jax.lax.optimization_barrier(grad.reshape(len(grad), -1))
    total = flat.astype(jnp.float32).sum(0).reshape(grad.shape[1:])
    return grad, total.astype(grad.dtype)


add_positions.defvjp(lambda x, p: (add_positions(x, p), None), add_positions_backward)


def row_keys(key, batch):
    """Return a key for each row of a batch."""
    return jax.vmap(jax.random.fold_in, (None, 0))(key, batch["row"])
