"""Parameter servers: accuracy on the digits in each mode, and speed with one slow worker.

    python benchmarks/server_modes.py accuracy
    python benchmarks/server_modes.py straggler
    python benchmarks/server_modes.py communication

Four workers and two servers, in threads of one process, so that two processors suffice. The
accuracy is that of the held-out digits after as many rows as one device sees. A slow worker
waits ten times as long as the others in each step; waiting stands for computing.
"""

import argparse
import json
import statistics
import time
from pathlib import Path

import jax
from server_communication import communication
from server_threads import thread_cluster

from jtrain.config.resolve import resolve
from jtrain.core.loop import Hook, train_loop
from jtrain.core.state import TrainState
from jtrain.server.plan import Plan
from jtrain.server.server_loop import take_steps
from jtrain.train.program import Program, set_up

SERVER = "parallel={kind: server, workers: 4, shards: 2, snapshot_every: 1000, mode: %s}"
STALE = ("optimizer.lr=1.5e-3", "optimizer.b1=0.6")  # staleness adds momentum of its own
MODES = {  # each with its own best values of benchmarks/server_simulation.py; others: the config's
    "sync": ("{kind: sync}",),
    "ssp, bound 2": ("{kind: ssp, bound: 2}", *STALE),
    "async": ("{kind: async}", *STALE),
    "async, scale": ("{kind: async, staleness: {kind: scale}}", *STALE),
    "async, compensate": ("{kind: async, staleness: {kind: compensate}}", *STALE),
    "local_sgd, 5 inner steps": ("{kind: local_sgd, inner_steps: 5}",),
    "diloco, 10 inner steps": ("{kind: diloco, inner_steps: 10, momentum: 0.6}",),
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


def set_up_digits(parallel: str, *settings: str) -> Program:
    """Return the setup of configs/digits.yaml."""

    values = ["steps_per_call=1", "evaluate.every=0", "checkpoint.every=0", "steps=600"]
    values += [parallel, *settings]
    return set_up(resolve(Path("configs/digits.yaml"), values).config)


def on_servers(program: Program, *hooks: Hook, slow: str = "") -> TrainState:
    """Train in threads."""
    state, stop = program.initial_state(), program.resolved.config.steps
    environ = {"JTRAIN_SERVER_SLOW": slow}
    with thread_cluster(Plan(program), environ=environ) as (coordinator, _):
        coordinator.start(0, state)
        return take_steps(coordinator, state, start=0, stop=stop, hooks=hooks).state


def on_one_device(program: Program) -> TrainState:
    """Train in one program."""
    stop = program.resolved.config.steps
    batches = (program.place(program.batches().train[step]) for step in range(stop))
    return train_loop(
        program.compile_step(), program.initial_state(), batches, start=0, stop=stop
    ).state


def accuracy(seeds: range, settings: list[str], results: Path) -> None:
    """Print the accuracy of each mode and its difference from one device, with standard errors.

    Args:
        settings: more values of the config.
        results: a line for each seed of a mode; a run that was stopped resumes from it.
    """
    rows = _read(results)
    for seed in seeds:
        for name in ("one device", *MODES):
            if seed in rows.get(name, {}):
                continue
            mode, *own = MODES.get(name, ("",))
            parallel = SERVER % mode if mode else "parallel.kind=single"
            program = set_up_digits(parallel, f"seed={seed}", *own, *settings)
            state = on_servers(program) if mode else on_one_device(program)
            found = program.measure(state)["accuracy"]
            with results.open("a") as file:
                file.write(json.dumps([name, seed, found]) + "\n")
    rows = _read(results)
    print("| | accuracy | standard error | against one device | its standard error |")
    print("|---|---|---|---|---|")
    for name, found in rows.items():
        apart = [100 * (found[seed] - rows["one device"][seed]) for seed in found]
        mean, error = statistics.mean(found.values()), _error([*found.values()])
        print(f"| {name} | {mean:.2%} | {error:.2%} | {statistics.mean(apart):+.2f} | ", end="")
        print(f"{_error(apart):.2f} |")


def _read(results: Path) -> dict[str, dict[int, float]]:
    rows: dict[str, dict[int, float]] = {}
    for line in results.read_text().splitlines() if results.exists() else []:
        name, seed, found = json.loads(line)
        rows.setdefault(name, {})[seed] = found
    return rows


def _error(values: list[float]) -> float:
    return statistics.stdev(values) / len(values) ** 0.5 if len(values) > 1 else float("nan")


def straggler(seconds: float, steps: int, only: str) -> None:
    """Print the rows a second with a slow worker, of those with even workers."""
    print("| | rows/s, even | one ten times slower | kept |\n|---|---|---|---|")
    for name, (mode, share) in STRAGGLER.items():
        if only not in ("", name):
            continue
        speeds = []
        for factor in (1, 10):
            times = Times()
            program = set_up_digits(SERVER % mode, f"steps={steps}", "model.widths=[16]")
            slow = ",".join([f"{seconds}"] * 3 + [f"{seconds * factor}"])
            on_servers(program, times, slow=slow)
            first = steps // 4  # after every worker has compiled its programs
            took = times.times[-1] - times.times[first - 1]
            used = share if factor > 1 else 1.0
            speeds.append(used * program.resolved.config.batch * (steps - first) / took)
        even, uneven = speeds
        print(f"| {name} | {even:.0f} | {uneven:.0f} | {uneven / even:.0%} |", flush=True)


def main() -> None:
    """Measure, and print a table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("what", choices=["accuracy", "straggler", "communication"])
    parser.add_argument("--seeds", type=int, default=5, help="of accuracy")
    parser.add_argument("--first-seed", type=int, default=0)
    parser.add_argument("--results", type=Path, help="file of finished runs, from which to resume")
    parser.add_argument("--seconds", type=float, default=0.25)
    parser.add_argument("--steps", type=int, default=80)
    parser.add_argument(
        "--only", default="", help="rows of one mode; of communication: of those that begin so"
    )
    parser.add_argument("--set", nargs="*", default=[], help="more values of the config")
    args = parser.parse_args()
    print(f"JAX {jax.__version__}, {jax.devices()[0].platform}")
    if args.what == "accuracy":
        seeds = range(args.first_seed, args.first_seed + args.seeds)
        accuracy(seeds, args.set, args.results or Path("accuracy.jsonl"))
    elif args.what == "communication":
        communication(args.only, args.set, args.results or Path("communication.jsonl"))
    else:
        straggler(args.seconds, args.steps, args.only)


if __name__ == "__main__":
    main()
