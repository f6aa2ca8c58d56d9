"""All gradients in one message against one message a leaf, between processes of CPUs.

python benchmarks/flat_psum.py [--processes 2] [--devices 1] [--leaves 96] [--size 8192]
"""

import argparse
import os
import statistics
import subprocess
import sys
import time

from jtrain.distributed.launcher.supervise import worker_environment
from jtrain.distributed.port import free_port

SCRIPT = os.path.abspath(__file__)


def measure(leaves: int, size: int, rounds: int) -> None:
    """Print milliseconds a sum, both ways in turn; each process runs this."""
    import jax
    import jax.numpy as jnp
    import numpy as np
    from jax.sharding import Mesh
    from jax.sharding import PartitionSpec as P

    from jtrain.distributed.cluster import detect, start
    from jtrain.parallel.strategies.mirrored import flat_psum

    start(detect(os.environ), {}, timeout=120.0)
    mesh = Mesh(np.array(jax.devices()), ("data",))
    make = jax.jit(
        lambda: [jnp.full((len(jax.devices()), size), i, jnp.float32) for i in range(leaves)],
        out_shardings=jax.sharding.NamedSharding(mesh, P("data")),
    )
    tree = make()
    by = lambda psum: jax.jit(
        jax.shard_map(psum, mesh=mesh, in_specs=P("data"), out_specs=P(), check_vma=False)
    )
    ways = {
        "a message a leaf": by(lambda tree: jax.lax.psum(tree, "data")),
        "one message": by(lambda tree: flat_psum(tree, "data")),
    }
    found = {name: [] for name in ways}
    first = {name: way(tree) for name, way in ways.items()}
    same = all(
        np.asarray(a).tobytes() == np.asarray(b).tobytes()
        for a, b in zip(*(jax.tree.leaves(x) for x in first.values()), strict=True)
    )
    for _ in range(rounds):
        for name, way in ways.items():
            began = time.perf_counter()
            jax.block_until_ready(way(tree))
            found[name].append(1e3 * (time.perf_counter() - began))
    if jax.process_index() == 0:
        ratios = [a / b for a, b in zip(*found.values(), strict=True)]
        for name, times in found.items():
            print(f"{name:18} {statistics.median(times):8.2f} ms", flush=True)
        low, half, high = statistics.quantiles(ratios, n=4)
        print(f"ratio, in pairs    {half:8.2f}  ({low:.2f} to {high:.2f}); same bits: {same}")


def main() -> None:
    """Start the processes."""
    parser = argparse.ArgumentParser(description=__doc__)
    for name, default in {"processes": 2, "devices": 1, "leaves": 96, "size": 8192}.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--rounds", type=int, default=20)
    typed = parser.parse_args()
    if "JTRAIN_PROCESS" in os.environ:
        measure(typed.leaves, typed.size, typed.rounds)
        return
    where = f"127.0.0.1:{free_port()}"
    told = [
        worker_environment(os.environ, where, i, typed.processes, typed.devices)
        for i in range(typed.processes)
    ]
    started = [subprocess.Popen([sys.executable, SCRIPT, *sys.argv[1:]], env=env) for env in told]
    sys.exit(max(process.wait() for process in started))


if __name__ == "__main__":
    main()
