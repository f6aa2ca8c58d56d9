"""The loop, and what may be typed."""

import argparse
import json
import sys

import jax

from jtrain.inspect.eject.pieces.optimizer import STEPS
from jtrain.inspect.eject.pieces.rows import batch_at, read_data
from jtrain.inspect.eject.pieces.safetensors import load, save
from jtrain.inspect.eject.pieces.step import start, step

JAX: str = "0.10.2"


def main(words=None):
    """Train, and print a line of JSON a step; return the state."""
    parser = argparse.ArgumentParser(description="Train, and print the losses.")
    parser.add_argument("--steps", type=int, default=STEPS, metavar="N")
    parser.add_argument("--devices", type=int, metavar="N", help="that share a batch (all)")
    parser.add_argument("--params", metavar="FILE.safetensors", help="parameters to begin with")
    parser.add_argument("--save", metavar="FILE.safetensors", help="write the parameters here")
    args = parser.parse_args(words)
    if jax.__version__ != JAX:
        print(f"made with jax {JAX}, this is {jax.__version__}: bits may differ", file=sys.stderr)
    # Data parallel: every device has the state and a part of the rows; the compiler adds the sums.
    count, auto = args.devices or len(jax.devices()), jax.sharding.AxisType.Auto
    mesh = jax.make_mesh((count,), ("data",), (auto,), devices=jax.devices()[:count])
    whole, rows = (jax.NamedSharding(mesh, spec) for spec in (jax.P(), jax.P("data")))
    read_data()
    state = jax.jit(start, out_shardings=whole)()
    if args.params:
        state["params"] = jax.device_put(load(args.params, state["params"]), whole)
    take_step = jax.jit(step, donate_argnums=0, out_shardings=whole)
    for number in range(args.steps):
        state, value = take_step(state, jax.device_put(batch_at(number), rows))
        print(json.dumps({"step": number + 1, "loss": float(value)}), flush=True)
    if args.save:
        save(args.save, state["params"])
    return state


if __name__ == "__main__":
    main()
