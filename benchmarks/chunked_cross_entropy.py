"""Memory and time of chunked against plain cross entropy, value and gradient, vocabulary of GPT-2.

Memory is the compiled program's (`memory_analysis().temp_size_in_bytes`): what it needs beside its
arguments and results.

    python benchmarks/chunked_cross_entropy.py [--rounds 7] [--rows 8] [--time 512] [--chunk 64]
"""

import argparse
import functools
import time

import jax
import jax.numpy as jnp
from pairs import machine, ratio, table, take_turns

from jtrain.losses.chunked_next_token import chunked_next_token
from jtrain.losses.next_token import next_token

VOCABULARY = 50_257


def plain(hidden, head, targets, real):
    """Compute the loss from all logits at once."""
    logits = jnp.einsum("btd,vd->btv", hidden, head, preferred_element_type=jnp.float32)
    return next_token(logits, targets, real)


def compiled(loss, arrays):
    """Compile the mean loss, the accuracy and both gradients."""

    def value(hidden, head, targets, real):
        mean, metrics = loss(hidden, head, targets, real)
        return mean.total / mean.weight, metrics["accuracy"].total

    gradient = jax.value_and_grad(value, (0, 1), has_aux=True)
    return jax.jit(gradient).lower(*arrays).compile()


def temporaries(program):
    """Return the bytes beside arguments and results."""
    memory = program.memory_analysis()
    assert memory is not None, "this backend does not tell"
    return memory.temp_size_in_bytes


def main() -> None:
    """Print the tables."""
    parser = argparse.ArgumentParser(description="Chunked against plain cross entropy.")
    for name, size in {"rounds": 7, "rows": 8, "time": 512, "width": 768, "chunk": 64}.items():
        parser.add_argument(f"--{name}", type=int, default=size)
    parser.add_argument("--bfloat16", action="store_true")
    given = parser.parse_args()
    keys = jax.random.split(jax.random.key(0), 3)
    dtype = jnp.bfloat16 if given.bfloat16 else jnp.float32
    shape = (given.rows, given.time)
    arrays = (
        jax.random.normal(keys[0], (*shape, given.width), dtype),
        jax.random.normal(keys[1], (VOCABULARY, given.width), dtype) * 0.02,
        jax.random.randint(keys[2], shape, 0, VOCABULARY),
        jnp.ones(shape, bool),
    )
    losses = {"plain": plain, "chunked": functools.partial(chunked_next_token, chunk=given.chunk)}
    programs = {name: compiled(loss, arrays) for name, loss in losses.items()}

    def seconds(program):
        start = time.perf_counter()
        jax.block_until_ready(program(*arrays))
        return time.perf_counter() - start

    sizes = {name: temporaries(program) / 1e6 for name, program in programs.items()}
    print(machine(), f"\n{given}\n\n| | temporaries, MB | over plain |\n|---|---:|---:|")
    for name, size in sizes.items():
        print(f"| {name} | {size:.0f} | {size / sizes['plain']:.3f} |")
    turns = {n: functools.partial(seconds, p) for n, p in programs.items()}
    times = take_turns(turns, given.rounds)
    print(f"\n{table(times, 's', 'plain')}")
    print(f"\nratio: {ratio(times['chunked'], times['plain'])}")


if __name__ == "__main__":
    main()
