"""Parameter servers: accuracy on the digits in each mode, and speed with one slow worker.

    python benchmarks/server_modes.py accuracy
    python benchmarks/server_modes.py straggler

Four workers and two servers, in threads of one process, so that two processors suffice. The
accuracy is that of the held-out digits after as many rows as one device sees. A slow worker
waits ten times as long as the others in each step; waiting stands for computing.
"""

import argparse
import statistics
import time
from pathlib import Path

import jax

from jtrain.config.resolve import resolve
from jtrain.core.loop import Hook, train_loop
from jtrain.core.state import TrainState
from jtrain.server.server_loop import take_steps
from jtrain.server.server_plan import Plan
from jtrain.server.threads import thread_cluster
from jtrain.train.setup import TrainSetup, set_up

SERVER = "parallel={kind: server, workers: 4, shards: 2, snapshot_every: 1000, mode: %s}"
MODES = {
    "sync": "{kind: sync}",
    "ssp, bound 2": "{kind: ssp, bound: 2}",
    "async": "{kind: async}",
    "async, scale": "{kind: async, staleness: {kind: scale}}",
    "async, compensate": "{kind: async, staleness: {kind: compensate}}",
    "local_sgd, 5 inner steps": "{kind: local_sgd, inner_steps: 5}",
    "diloco, 10 inner steps": "{kind: diloco, inner_steps: 10}",
}
STRAGGLER = {  # each with a slow worker, beside the same mode with even ones
    "sync": ("{kind: sync}", 1.0),
    "sync, one backup": ("{kind: sync, backups: 1}", 0.75),  # the rows of three workers
    "ssp, bound 10": ("{kind: ssp, bound: 10}", 1.0),
    "async": ("{kind: async}", 1.0),
}


class Times(Hook):
    """Hook that keeps the time of each step."""

    def __init__(self):
        self.times: list[float] = []

    def on_numbers(self, step, numbers) -> None:
        """Keep the time."""
        self.times.append(time.perf_counter())


def set_up_digits(parallel: str, *settings: str) -> TrainSetup:
    """Return the setup of configs/digits.yaml."""

    values = ["steps_per_call=1", "evaluate.every=0", "checkpoint.every=0", parallel, *settings]
    return set_up(resolve(Path("configs/digits.yaml"), values).config)


def on_servers(setup: TrainSetup, *hooks: Hook, slow: str = "") -> TrainState:
    """Train in threads."""
    state, stop = setup.fresh(), setup.config.steps
    environ = {"JTRAIN_SERVER_SLOW": slow}
    with thread_cluster(Plan(setup), environ=environ) as (coordinator, _):
        coordinator.start(0, state)
        return take_steps(coordinator, state, start=0, stop=stop, hooks=hooks).state


def on_one_device(setup: TrainSetup) -> TrainState:
    """Train in one program."""
    stop = setup.config.steps
    batches = (setup.place(setup.train[step]) for step in range(stop))
    return train_loop(setup.compile_step(), setup.fresh(), batches, start=0, stop=stop).state


def accuracy(seeds: int) -> None:
    """Print the accuracy of each mode."""
    rows: dict[str, list[float]] = {}
    for seed in range(seeds):
        for name in ("one device", *MODES):
            parallel = SERVER % MODES[name] if name in MODES else "parallel.kind=single"
            setup = set_up_digits(parallel, f"seed={seed}")
            state = on_servers(setup) if name in MODES else on_one_device(setup)
            rows.setdefault(name, []).append(setup.measure(state)["accuracy"])
            print(f"# {name}, seed {seed}: {rows[name][-1]:.4f}", flush=True)
    base = statistics.mean(rows["one device"])
    print("| | accuracy | against one device |\n|---|---|---|")
    for name, found in rows.items():
        mean = statistics.mean(found)
        print(f"| {name} | {mean:.2%} | {100 * (mean - base):+.2f} |")


def straggler(seconds: float, steps: int) -> None:
    """Print the rows a second with a slow worker, of those with even workers."""
    print("| | rows/s, even | one ten times slower | kept |\n|---|---|---|---|")
    for name, (mode, share) in STRAGGLER.items():
        speeds = []
        for factor in (1, 10):
            times = Times()
            setup = set_up_digits(SERVER % mode, f"steps={steps}", "model.widths=[16]")
            slow = ",".join([f"{seconds}"] * 3 + [f"{seconds * factor}"])
            on_servers(setup, times, slow=slow)
            first = steps // 4  # after every worker has compiled its programs
            took = times.times[-1] - times.times[first - 1]
            used = share if factor > 1 else 1.0
            speeds.append(used * setup.config.batch * (steps - first) / took)
        even, uneven = speeds
        print(f"| {name} | {even:.0f} | {uneven:.0f} | {uneven / even:.0%} |", flush=True)


def main() -> None:
    """Measure, and print a table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("what", choices=["accuracy", "straggler"])
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=0.25)
    parser.add_argument("--steps", type=int, default=80)
    args = parser.parse_args()
    print(f"JAX {jax.__version__}, {jax.devices()[0].platform}")
    if args.what == "accuracy":
        accuracy(args.seeds)
    else:
        straggler(args.seconds, args.steps)


if __name__ == "__main__":
    main()
