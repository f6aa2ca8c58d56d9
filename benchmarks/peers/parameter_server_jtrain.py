"""An MLP on jtrain's parameter servers, in processes.

Reads "steps" from each line of its input, lets the workers take as many, and writes the
milliseconds that one took. Its first line of output names the version.
"""

import json
import sys
import tempfile
import time
from pathlib import Path

import jax

from jtrain.config.dump import dump, to_plain
from jtrain.config.resolve import resolve
from jtrain.server.coordinator import Coordinator
from jtrain.server.engines import LocalEngine
from jtrain.server.plan import Plan
from jtrain.server.server_loop import coordinator_of
from jtrain.server.supervisor import open_cluster
from jtrain.train.program import set_up


def take(coordinator: Coordinator, first: int, steps: int) -> int:
    """Let the workers take steps, and return the last one."""
    done = first
    while done < first + steps:
        done = coordinator.advance(first + steps)[-1][0]
    return done


def main() -> None:
    """Serve turns until the input ends."""
    config = resolve(Path("configs/digits.yaml"), json.loads(sys.argv[1])).config
    plan = Plan(set_up(config))
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "config.yaml"
        path.write_text(dump(to_plain(config)))
        log = lambda line: print(line, file=sys.stderr)
        engine = LocalEngine(path, plan.server.workers)
        with open_cluster(plan, engine, coordinator_of(plan), log) as (coordinator, _):
            coordinator.start(0, plan.program.initial_state())
            done = take(coordinator, 0, 4)
            print(f"JAX {jax.__version__}, {plan.server.workers} workers", flush=True)
            for line in sys.stdin:
                start = time.perf_counter()
                done = take(coordinator, done, int(line))
                print((time.perf_counter() - start) / int(line) * 1e3, flush=True)


if __name__ == "__main__":
    main()
