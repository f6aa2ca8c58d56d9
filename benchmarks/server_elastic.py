"""Workers that come and go beside workers that stay: the validation loss of a transformer.

    python benchmarks/server_elastic.py --seeds 3

The character transformer of configs/shakespeare.yaml, small, on two servers. Four workers stay; or
a seed draws who comes and goes, between two and six at a time, and with one departure in four
another worker goes without a word. Workers are threads of one process, so that two processors
suffice, and each step waits a little, which stands for computing.
"""

import argparse
import contextlib
import random
import threading
from pathlib import Path
from typing import NamedTuple

import jax
from server_threads import ThreadProcess, thread_cluster

from jtrain.config.resolve import resolve
from jtrain.errors import ConfigError, PeerError
from jtrain.server.coordinator import Coordinator
from jtrain.server.plan import Plan
from jtrain.server.process import work
from jtrain.server.server_loop import take_steps
from jtrain.server.supervisor import Supervisor
from jtrain.train.program import Program, set_up


class Row(NamedTuple):
    """A mode, its largest number of workers, and values of the config."""

    mode: str
    most: int
    values: tuple[str, ...]


MODES = {
    "diloco": Row("{kind: diloco, inner_steps: 20}", 0, ("steps=400",)),
    "async": Row(
        "{kind: async}",
        6,
        (
            *("steps=2000", "optimizer.lr=5e-4", "optimizer.b1=0.6"),
            "optimizer.schedule={kind: cosine, warmup: 200, final: 0.1}",
        ),
    ),
}
SERVER = "parallel={kind: server, workers: 4, max_workers: %d, shards: 2, mode: %s}"
LEAST, MOST = 2, 6
SLOW = 0.02  # seconds that each step waits


class Crowd:
    """Workers that come and go, as a seed draws it, until the block ends."""

    def __init__(self, coordinator: Coordinator, supervisor: Supervisor, seed: int):
        self._coordinator, self._supervisor = coordinator, supervisor
        self._draw, self._over = random.Random(seed), threading.Event()
        threads = [supervisor.processes["worker", index] for index in range(4)]
        self._there = [each.leaving for each in threads if isinstance(each, ThreadProcess)]
        self.numbers = [4]
        """Numbers of workers at a time, one for each change."""
        self.deaths = 0

    def __enter__(self) -> "Crowd":
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._over.wait(self._draw.uniform(0.5, 2.0)):
            comes = self._draw.random() < 0.5
            if len(self._there) <= LEAST or (comes and len(self._there) < MOST):
                self._there.append(threading.Event())
                threading.Thread(target=self._work, args=self._there[-1:], daemon=True).start()
            else:
                self._there.pop(self._draw.randrange(len(self._there))).set()
                if self._draw.random() < 0.25:
                    self._take_one_for_dead()
            self.numbers.append(len(self._there))

    def _work(self, leaving: threading.Event) -> None:
        environ = {"JTRAIN_SERVER_SLOW": f"{SLOW}", **self._supervisor.environ}
        with contextlib.suppress(PeerError, ConfigError):  # the run has ended
            work(self._coordinator.plan, None, environ, leaving=leaving)

    def _take_one_for_dead(self) -> None:
        """Drop a worker as one whose machine is gone; it comes again as another."""
        with self._coordinator._changed:
            members = self._coordinator.members
            member = members[self._draw.choice(sorted(members))]
            self._coordinator._remove(member, "its connection broke")
        self.deaths += 1


def measure(program: Program, seed: int | None) -> tuple[float, str]:
    """Return the validation loss, and who was there: four that stay, or those of a seed."""
    state, stop = program.initial_state(), program.resolved.config.steps
    environ = {"JTRAIN_SERVER_SLOW": ",".join([f"{SLOW}"] * 4)}
    quiet = lambda line: None
    with thread_cluster(Plan(program), environ=environ, log=quiet) as (coordinator, supervisor):
        coordinator.start(0, state)
        if seed is None:
            end, who = take_steps(coordinator, state, start=0, stop=stop, hooks=()), "4 stay"
        else:
            with Crowd(coordinator, supervisor, seed) as crowd:
                end = take_steps(coordinator, state, start=0, stop=stop, hooks=())
            numbers = f"{min(crowd.numbers)} to {max(crowd.numbers)}"
            who = f"{numbers}, {len(crowd.numbers) - 1} changes, {crowd.deaths} deaths"
    return program.measure(end.state)["loss"], who


def main() -> None:
    """Measure, and print a table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--set", nargs="*", default=[], help="more values of the config")
    parser.add_argument("--modes", nargs="+", default=list(MODES))
    args = parser.parse_args()
    print(f"JAX {jax.__version__}, {jax.devices()[0].platform}", flush=True)
    values = ["batch=16", "evaluate.every=0", "checkpoint.every=0"]
    values += ["model.layers=2", "model.width=64", "model.heads=2", "model.context=64"]
    for name in args.modes:
        row = MODES[name]
        server = SERVER % (row.most, row.mode)
        settings = [*values, *row.values, *args.set, server]
        program = set_up(resolve(Path("configs/shakespeare.yaml"), settings).config)
        base = 0.0
        for seed in (None, *range(args.seeds)):
            loss, who = measure(program, seed)
            base = loss if seed is None else base
            print(f"| {name} | {who} | {loss:.4f} | {loss - base:+.4f} |", flush=True)


if __name__ == "__main__":
    main()
