"""nanoGPT's model in jtrain, over devices or processes of this machine, in a process of its own.

Reads "steps" from each line of its input, takes as many and, if it is the first of its processes,
writes the milliseconds that one took. Its first line of output says how it is split.

    python benchmarks/peers/split_transformer.py '{"sizes": {...}, "batch": 12, "parallel": {...}}'
"""

import json
import os
import sys
import time
from typing import Any

import jax
import numpy as np
import optax

from jtrain.core.state import new_state
from jtrain.core.step import make_step
from jtrain.distributed.cluster import detect, start
from jtrain.losses.next_token import inputs_and_targets, next_token
from jtrain.models.transformer import Transformer
from jtrain.parallel import Mirrored, Single

BATCHES = 16


def main() -> None:
    """Serve steps until the input ends."""
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # where gloo says that it is connected
    given: dict[str, Any] = json.loads(sys.argv[1])
    sizes, size = given["sizes"], given["batch"]
    start(detect(os.environ), {}, timeout=60.0)
    values = Mirrored(**given["parallel"]) if given["parallel"] else Single()
    strategy = values.build()
    model = Transformer(**sizes).build(strategy.placement)
    optimizer = optax.adamw(1e-3, weight_decay=1e-4)

    def loss(params, batch, rng):
        inputs, targets, real = inputs_and_targets(batch)
        logits, _ = model.apply(params, {}, inputs, rng=rng, train=True)
        return next_token(logits, targets, real)

    make = lambda: new_state(model.init(jax.random.key(0))[0], optimizer, jax.random.key(1))
    like = jax.eval_shape(make)
    state = jax.jit(make, out_shardings=strategy.shardings(like, model.dims))()
    step = make_step(
        loss,
        optimizer,
        psum=strategy.psum,
        sharding=strategy.gradient_sharding(like.params, model.dims),
    )
    draw = np.random.default_rng(0)
    shape = (BATCHES, size, sizes["context"] + 1)
    tokens = draw.integers(0, sizes["vocab"], shape).astype(np.int32)
    mine = slice(jax.process_index(), None, jax.process_count())
    rows, mask = np.arange(size, dtype=np.int32)[mine], np.ones(size, bool)[mine]
    batch = lambda i: {"tokens": tokens[i % BATCHES, mine], "row": rows, "mask": mask}
    program = strategy.compile(step, state, strategy.place(batch(0)), returns_state=True)
    first = jax.process_index() == 0
    if first:
        print(f"{len(jax.devices())} devices, {jax.process_count()} processes", file=answers)
    for line in sys.stdin:
        began = time.perf_counter()
        for i in range(int(line)):
            state, metrics = program(state, strategy.place(batch(i)))
            if i % 8 == 7:
                jax.block_until_ready(metrics)
        jax.block_until_ready(state)
        if first:
            print((time.perf_counter() - began) / int(line) * 1e3, file=answers)


if __name__ == "__main__":
    main()
