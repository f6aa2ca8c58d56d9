"""The script that anyone would write: our transformer, optax and `jax.jit`, and no more.

python benchmarks/peers/by_hand.py '{"sizes": {...}, "batch": 16, "steps": 1, "clip": 1.0}'
"""

import json
import os
import resource
import sys

import jax
import numpy as np
import optax

from jtrain.data.known_sets import Shakespeare
from jtrain.losses.cross_entropy import cross_entropy_per_label
from jtrain.models.networks.decoder import (
    Decoder,  # what the model needs is an import, not memory of it
)
from jtrain.models.transformer import Transformer

assert Decoder


def main() -> None:
    """Print a line when the first step is done, and at the end the growth of memory."""
    given = json.loads(sys.argv[1])
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    if cache := os.environ.get("JAX_COMPILATION_CACHE_DIR"):
        jax.config.update("jax_compilation_cache_dir", cache)
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    sizes, size = given["sizes"], given["batch"]
    text = Shakespeare(context=sizes["context"]).build()
    model = Transformer(**{"vocab": len(text.vocabulary), **sizes}).build()
    tokens = text.train[np.arange(len(text.train), step=sizes["context"])]["tokens"]
    optimizer = optax.chain(optax.clip_by_global_norm(given["clip"]), optax.adamw(2e-3))

    def loss(params, tokens):
        logits, _ = model.apply(params, {}, tokens[:, :-1], train=True)
        return cross_entropy_per_label(logits, tokens[:, 1:]).mean()

    def step(params, opt_state, tokens):
        value, grads = jax.value_and_grad(loss)(params, tokens)
        updates, opt_state = optimizer.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, value

    init = jax.jit(lambda key: (lambda p: (p, optimizer.init(p)))(model.init(key)[0]))
    params, opt_state = init(jax.random.key(0))
    jitted = jax.jit(step, donate_argnums=(0, 1))
    order = np.random.default_rng(0).permutation(len(tokens))
    for i in range(given["steps"]):
        batch = tokens[order[size * i : size * (i + 1)]]
        params, opt_state, value = jitted(params, opt_state, batch)
        print(f"step {i + 1} loss {float(value):.4f}", flush=True)
    print(json.dumps({"grown": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before}))


if __name__ == "__main__":
    main()
