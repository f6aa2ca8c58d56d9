"""LoRA beside full fine-tuning: time of a step, and memory of its compiled program.

    python benchmarks/lora.py [ROUNDS]

Terms beside the kernels (`x W + (x A) B`) and terms added to the kernels (`x (W + A B)`), the same
transformer trained in full, and frozen kernels in 8 and 4 bits. Steps of all are interleaved, so
that other work on the machine meets them alike; medians of each, and of the ratios.
"""

import statistics
import sys
import time
from typing import Literal

import jax
import jax.numpy as jnp
import numpy as np
import optax

from jtrain.core.state import new_state
from jtrain.core.step import make_step
from jtrain.finetune.lora import Lora, adapted_loss, build_adapter
from jtrain.losses.next_token import next_token
from jtrain.models.transformer import Transformer

WIDTH, LAYERS, TIME, ROWS, VOCABULARY = 512, 2, 128, 8, 256
MODEL = Transformer(context=TIME, layers=LAYERS, heads=8, width=WIDTH, vocab=VOCABULARY).build()


def loss(params, batch, rng):
    """Return nats a token."""
    del rng
    logits, _ = MODEL.apply(params, {}, batch["tokens"][:, :-1])
    return next_token(logits, batch["tokens"][:, 1:], jnp.ones((ROWS, TIME), bool))


def build(frozen: Literal["as_is", "int8", "nf4"] | None, *, beside: bool = True):
    """Return a compiled step and its state; `frozen` None trains in full."""
    params, extra = MODEL.init(jax.random.key(0))
    used = loss
    if frozen is not None:
        linear = MODEL.linear if beside else {}
        settings = Lora(rank=8, on=("*kernel",), frozen=frozen)
        adapter = build_adapter(settings, params, MODEL.dims, linear)
        used = adapted_loss(adapter, loss)
        params, extra = jax.jit(adapter.attach)((params, extra), jax.random.key(1))
    else:
        extra = ()
    optimizer = optax.adamw(1e-4)
    state = new_state(params, optimizer, jax.random.key(2), extra)
    step = jax.jit(make_step(used, optimizer), donate_argnums=0)
    return step.lower(state, BATCH).compile(), state


BATCH = {
    "tokens": jnp.asarray(
        np.random.default_rng(0).integers(0, VOCABULARY, (ROWS, TIME + 1)), jnp.int32
    ),
    "row": jnp.arange(ROWS, dtype=jnp.int32),
    "mask": jnp.ones(ROWS, bool),
}


def main() -> None:
    """Print a row for each way."""
    rounds = int(sys.argv[1]) if sys.argv[1:] else 10
    ways = {
        "in full": build(None),
        "beside": build("as_is"),
        "added": build("as_is", beside=False),
        "beside int8": build("int8"),
        "beside nf4": build("nf4"),
    }
    states = {name: state for name, (_, state) in ways.items()}
    times = {name: [] for name in ways}
    for turn in range(rounds + 1):
        for name, (step, _) in ways.items():
            start = time.perf_counter()
            states[name], _ = jax.block_until_ready(step(states[name], BATCH))
            if turn:
                times[name].append(time.perf_counter() - start)
    print(f"{'':12} ms a step  of in full  state MB  temporary MB")
    for name, (step, _) in ways.items():
        memory = step.memory_analysis()
        assert memory is not None, "XLA:CPU reports memory"
        ratio = statistics.median(a / b for a, b in zip(times[name], times["in full"], strict=True))
        print(
            f"{name:12} {1e3 * statistics.median(times[name]):9.0f} {ratio:11.2f} "
            f"{memory.argument_size_in_bytes / 1e6:9.1f} {memory.temp_size_in_bytes / 1e6:13.1f}"
        )


if __name__ == "__main__":
    main()
