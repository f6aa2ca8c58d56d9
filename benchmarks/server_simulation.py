"""Settings for the modes of parameter servers: their arithmetic in one program, without servers.

    python benchmarks/server_simulation.py digits --mode async --set optimizer.lr=1e-3
    python benchmarks/server_simulation.py characters --mode diloco --inner 50 --warm 500
    python benchmarks/server_simulation.py characters --mode servers --parallel "pulls: bf16, mode:
        {kind: streaming_diloco, inner_steps: 50}"

A seed takes seconds, so that rates and momenta can be searched before the servers confirm them.
Under `async` every gradient is of parameters `workers - 1` updates old, as when the workers take
turns; with `--crowd` a seed draws between 2 and 6 workers, and another number every 15 steps. Under
`diloco` each worker has its share of the rows and an optimizer state of its own. With `--warm`
every mode begins from the same model, which one device has trained for as many steps at a constant
rate. `--mode servers` is for streaming_diloco and async_diloco, with the values of `--parallel`.
"""

import argparse
import functools
import statistics
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from server_communication import SERVER, SMALL, warm_params
from simulate_local_steps import simulate

from jtrain.config.resolve import resolve
from jtrain.core.gradient import make_gradient
from jtrain.core.pytree import norm
from jtrain.core.state import TrainState
from jtrain.core.step import make_step
from jtrain.core.types import Batch
from jtrain.server.plan import Plan
from jtrain.train.program import Program, set_up

TASKS = {
    "digits": ("configs/digits.yaml", [], "accuracy"),
    "clothes": ("configs/fashion_mnist.yaml", [], "accuracy"),
    "characters": ("configs/shakespeare.yaml", SMALL, "loss"),
}
MODES = ["single", "async", "diloco", "servers"]
CHUNK = 50  # steps whose batches are on the device together
CROWD = (2, 6)  # workers at a time, where a seed draws them


def stacked(program: Program, start: int, stop: int, workers: int = 0) -> Batch:
    """Return the batches of steps, stacked; with workers, steps x workers x rows of each."""
    batches = [program.batches().train[step] for step in range(start, stop)]
    whole = {name: np.stack([np.asarray(b[name]) for b in batches]) for name in batches[0]}
    if not workers:
        return whole
    cut = lambda x: x.reshape(len(x), workers, -1, *x.shape[2:])
    return {name: cut(array) for name, array in whole.items()}


def chunks(start: int, stop: int, size: int) -> Iterator[tuple[int, int]]:
    """Yield steps from `start` to `stop` in runs of `size`."""
    for first in range(start, stop, size):
        yield first, min(first + size, stop)


class Programs:
    """Compiled programs of a program, for each of its seeds."""

    def __init__(self, program: Program, most: int):
        x, config = program.resolved.experiment, program.resolved.config
        arguments = {"microbatches": config.microbatches, "ragged": x.train.ragged}
        step = make_step(x.loss, x.transformation, rows_interact=x.rows_interact, **arguments)
        bind = make_gradient(x.loss, **arguments)
        update = optax.with_extra_args_support(x.transformation).update

        def stale(carry: Any, inputs: Any) -> Any:
            """Take a step with the gradient of parameters that are `age` updates old."""
            (state, ring), (batch, age) = carry, inputs
            older = jax.tree.map(lambda r: r[age], ring)
            value, grads, _, _ = bind(state, batch)(older)
            known = {"value": value, "grad": grads, "grad_norm": norm(grads)}
            updates, opt_state = update(grads, state.opt_state, state.params, **known)
            params = optax.apply_updates(state.params, updates)
            ring = jax.tree.map(lambda r, p: jnp.concatenate([p[None], r[:-1]]), ring, params)
            state = TrainState(
                step=state.step + 1,
                skipped=state.skipped,
                scale=state.scale,
                params=params,
                extra=state.extra,
                opt_state=opt_state,
                seed=state.seed,
            )
            return (state, ring), value

        self.single = jax.jit(lambda state, batches: jax.lax.scan(step, state, batches))
        self.stale = jax.jit(lambda carry, inputs: jax.lax.scan(stale, carry, inputs))
        self.ring = lambda params: jax.tree.map(lambda p: jnp.stack([p] * most), params)


def single(programs: Programs, program: Program, state: TrainState, start: int, stop: int):
    """Train on one device."""
    for first, last in chunks(start, stop, CHUNK):
        state, _ = programs.single(state, stacked(program, first, last))
    return state


def run_async(programs: Programs, program: Program, state: TrainState, args: Any):
    """Train on gradients that are stale."""
    draw = np.random.default_rng(program.resolved.config.seed)
    carry = state, programs.ring(state.params)
    for first, last in chunks(0, program.resolved.config.steps, CHUNK):
        ages = np.full(last - first, args.workers - 1)
        if args.crowd:
            counts = draw.integers(CROWD[0], CROWD[1] + 1, 1 + (last - first) // 15)
            ages = np.repeat(counts, 15)[: last - first] - 1
        carry, _ = programs.stale(carry, (stacked(program, first, last), ages))
    return carry[0]


def run_diloco(
    programs: Programs,
    program: Program,
    state: TrainState,
    args: Any,
    observe: Callable[[int, TrainState], None],
):
    """Train with local steps, and Nesterov steps of the mean change."""
    outer = optax.sgd(args.outer_lr, momentum=args.outer_momentum or None, nesterov=True)
    outer_state = outer.init(state.params)
    opt_states = [state.opt_state] * args.workers
    for first, last in chunks(0, program.resolved.config.steps, args.inner):
        batches, ends = stacked(program, first, last, args.workers), []
        for worker in range(args.workers):
            own = {name: array[:, worker] for name, array in batches.items()}
            begin = with_params(state, state.params, opt_states[worker])
            end, _ = programs.single(begin, own)
            ends.append(end)
        opt_states = [end.opt_state for end in ends]
        mean = jax.tree.map(
            lambda *xs: sum(xs[1:], start=xs[0]) / len(xs), *[e.params for e in ends]
        )
        change = jax.tree.map(lambda old, new: old - new, state.params, mean)
        updates, outer_state = outer.update(change, outer_state, state.params)
        params = optax.apply_updates(state.params, updates)
        state = with_params(ends[0], params, state.opt_state)
        observe(last, state)
    return state


def run_servers(program: Program, state: TrainState) -> TrainState:
    """Train in the mode of the config."""
    workers = Plan(program).server.workers

    @functools.lru_cache(maxsize=1)
    def read_all(first: int, last: int) -> Batch:
        return stacked(program, first - 1, last, workers)

    def read(worker: int, first: int, last: int) -> Batch:
        return {name: array[:, worker] for name, array in read_all(first, last).items()}

    params = jax.tree.map(jnp.asarray, simulate(program, state, read))
    return with_params(state, params, state.opt_state)


def with_params(state: TrainState, params: Any, opt_state: Any) -> TrainState:
    """Return the state with other parameters and optimizer state."""
    fields = ("step", "skipped", "scale", "extra", "seed")
    rest = {name: getattr(state, name) for name in fields}
    return TrainState(params=params, opt_state=opt_state, **rest)


def measure(
    programs: Programs, program: Program, state: TrainState, args: Any, metric: str
) -> float:
    """Return accuracy or loss of a seed in a mode."""

    def observe(step: int, state: TrainState) -> None:
        if args.every and step % args.every == 0:
            print(f"#   step {step}: {program.measure(state)[metric]:.4f}", flush=True)

    stop = program.resolved.config.steps
    if args.mode == "async":
        state = run_async(programs, program, state, args)
    elif args.mode == "servers":
        state = run_servers(program, state)
    elif args.mode == "diloco":
        state = run_diloco(programs, program, state, args, observe)
    else:
        for first, last in chunks(0, stop, args.every or stop):
            state = single(programs, program, state, first, last)
            observe(last, state)
    return program.measure(state)[metric]


def main() -> None:
    """Measure a mode with some values, and print mean and standard error over seeds."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("task", choices=list(TASKS))
    parser.add_argument("--mode", choices=MODES, default="single")
    parser.add_argument("--parallel", default="", help="values under `parallel`, of mode servers")
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--first-seed", type=int, default=0)
    parser.add_argument("--workers", type=int, default=4)
    parser.add_argument("--crowd", action="store_true", help="a seed draws the workers")
    parser.add_argument("--inner", type=int, default=50)
    parser.add_argument("--outer-lr", type=float, default=0.7)
    parser.add_argument("--outer-momentum", type=float, default=0.9)
    parser.add_argument("--warm", type=int, default=0, help="steps on one device before the run")
    parser.add_argument("--every", type=int, default=0, help="steps between two evaluations")
    parser.add_argument("--set", nargs="*", default=[], help="values of the config")
    args = parser.parse_args()
    path, values, metric = TASKS[args.task]
    values = [*values, "steps_per_call=1", "evaluate.every=0", "checkpoint.every=0", *args.set]
    values += [SERVER % args.parallel] if args.mode == "servers" else []
    programs, found, began = None, [], time.monotonic()
    for seed in range(args.first_seed, args.first_seed + args.seeds):
        program = set_up(resolve(Path(path), [*values, f"seed={seed}"]).config)
        programs = programs or Programs(program, most=max(CROWD[1], args.workers))
        state = program.initial_state()
        if args.warm:
            state = with_params(state, warm_params(program, args.warm), state.opt_state)
        found.append(measure(programs, program, state, args, metric))
    error = statistics.stdev(found) / len(found) ** 0.5 if len(found) > 1 else float("nan")
    told = " ".join(f"{each:.4f}" for each in found)
    print(f"{args.task} {args.mode} {' '.join(args.set)}: {statistics.mean(found):.4f} ", end="")
    print(f"+- {error:.4f} ({told}) {time.monotonic() - began:.0f} s", flush=True)


if __name__ == "__main__":
    main()
