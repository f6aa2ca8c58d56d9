"""The autoencoder of experiments/vae.py in plain JAX and optax: no line of jtrain.

    python benchmarks/peers/plain_vae.py PATH/digits.csv.gz [--seed 0] [--steps 3000]

It prints the bound in nats a digit, over the digits that are kept back.
"""

import argparse
import gzip
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.scipy.special import gammaln

HIDDEN, LATENTS, BATCH = 256, 8, 128


def main() -> None:
    """Print the bound."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("digits", type=Path)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--steps", type=int, default=3000)
    asked = parser.parse_args()
    with gzip.open(asked.digits, "rt") as lines:
        counts = np.loadtxt(lines, delimiter=",", dtype=np.float32)[:, :64]
    order = np.random.default_rng(0).permutation(len(counts))
    kept, rest = np.split(counts[order], [len(counts) // 5])
    print(f"{bound_after(rest, kept, seed=asked.seed, steps=asked.steps):.3f} nats a digit")


def bound_after(train: np.ndarray, kept: np.ndarray, *, seed: int, steps: int) -> float:
    """Return nats a digit of `kept` (n 64, counts of 0 .. 16) after training on `train`."""
    rate = optax.cosine_decay_schedule(1e-3, steps, alpha=0.1)
    adam = optax.adam(rate)
    draws = np.random.default_rng(seed)

    @jax.jit
    def step(params, state, counts, key):
        grads = jax.grad(bound)(params, counts, key)
        updates, state = adam.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    params = init(jax.random.key(seed))
    state, key, order = adam.init(params), jax.random.key(seed + 1), np.empty(0, int)
    for number in range(steps):
        if len(order) < BATCH:
            order = np.concatenate([order, draws.permutation(len(train))])
        rows, order = order[:BATCH], order[BATCH:]
        params, state = step(params, state, train[rows], jax.random.fold_in(key, number))
    return float(jax.jit(bound)(params, kept, jax.random.key(0)))


def init(key):
    """Initialize kernels by He et al. 2015, biases at zero."""
    sizes = ((64, HIDDEN), (HIDDEN, 2 * LATENTS), (LATENTS, HIDDEN), (HIDDEN, 64))
    keys = jax.random.split(key, 4)
    kernel = lambda key, size: jax.random.normal(key, size) * np.sqrt(2 / size[0])
    return [(kernel(*each), jnp.zeros(each[1][1])) for each in zip(keys, sizes, strict=True)]


def bound(params, counts, key):
    """Return the negative evidence lower bound, the mean over the rows."""
    up, known, down, out = params
    h = jax.nn.relu(counts / 16 @ up[0] + up[1])
    mean, log_variance = jnp.split(h @ known[0] + known[1], 2, axis=1)
    z = mean + jnp.exp(log_variance / 2) * jax.random.normal(key, mean.shape)
    logits = jax.nn.relu(z @ down[0] + down[1]) @ out[0] + out[1]
    ways = gammaln(17.0) - gammaln(counts + 1) - gammaln(17 - counts)
    log_p = counts * jax.nn.log_sigmoid(logits) + (16 - counts) * jax.nn.log_sigmoid(-logits) + ways
    kl = (mean**2 + jnp.exp(log_variance) - log_variance - 1) / 2
    return jnp.mean(kl.sum(1) - log_p.sum(1))


if __name__ == "__main__":
    main()
