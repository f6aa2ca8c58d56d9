"""Plans of virtual CPU devices against runs of the same configs: memory, and the order of times.

    python benchmarks/plan_against_runs.py memory     the growth of a process, and the plan's peak
    python benchmarks/plan_against_runs.py times      times of a step, and their estimates

Each config runs in a process of its own. Times of virtual devices have no meaning for other
machines: only their order is compared.
"""

import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path

DEVICES = 8
CONFIG = "configs/shakespeare.yaml"
# 1.6 GB of parameters and moments, and the gradients and activations of a step.
LARGE = ["model.width=1536", "model.layers=4", "batch=8", "data.context=64", "model.context=64"]
MEMORY = {
    "fsdp": [*LARGE, "parallel.kind=fsdp"],
    "fsdp, remat": [*LARGE, "parallel.kind=fsdp", "model.remat=full"],
    "tensor 8": [*LARGE, "parallel.kind=sharded", "parallel.fsdp=1", "parallel.tensor=8",
                 "model.heads=8"],
    "tensor 8, arrays of 1 GB": ["model.width=8192", "model.layers=1", "model.heads=8", "batch=8",
                                 "data.context=64", "model.context=64", "parallel.kind=sharded",
                                 "parallel.fsdp=1", "parallel.tensor=8", "optimizer.kind=sgd"],
}  # fmt: skip
SMALL = ["data.context=64", "model.context=64", "model.heads=4"]
TIMES = {
    "width 64": ["model.width=64", "model.layers=2", "batch=16"],
    "width 64, 8 layers": ["model.width=64", "model.layers=8", "batch=16"],
    "width 128": ["model.width=128", "model.layers=4", "batch=16"],
    "width 128, batch 64": ["model.width=128", "model.layers=4", "batch=64"],
    "the same, remat": ["model.width=128", "model.layers=4", "batch=64", "model.remat=full"],
    "width 256": ["model.width=256", "model.layers=4", "batch=32"],
    "width 256, fsdp": ["model.width=256", "model.layers=4", "batch=64", "parallel.kind=fsdp"],
    "width 512, 1 layer": ["model.width=512", "model.layers=1", "batch=8"],
}


def measure_memory(words: list[str]) -> dict[str, float]:
    """Return the plan's bytes of all devices, and the growth of this process in two steps."""
    program, plan = _plan(words)
    step, batch = program.compile_step(), program.place(program.batches().stacked[0])
    before = _status("VmRSS")
    state = _ready(program.initial_state())
    Path("/proc/self/clear_refs").write_text("5")  # forget the highest memory so far
    for _ in range(2):
        state, _ = _ready(step(state, batch))
    return {"plan": plan.peak * DEVICES, "run": _status("VmHWM") - before}


def measure_time(words: list[str]) -> dict[str, float]:
    """Return the estimate and the median time of ten steps."""
    program, plan = _plan([*SMALL, *words])
    step, batch, state = (
        program.compile_step(),
        program.place(program.batches().stacked[0]),
        program.initial_state(),
    )
    seconds = []
    for _ in range(11):
        start = time.perf_counter()
        state, _ = _ready(step(state, batch))
        seconds.append(time.perf_counter() - start)
    assert plan.estimate is not None
    return {"plan": plan.estimate.seconds, "run": statistics.median(seconds[1:])}


def rank_correlation(pairs: list[dict[str, float]]) -> float:
    """Return Spearman's rank correlation of estimates and times."""
    rank = lambda values: [
        sum(x < value for x in values) + (sum(x == value for x in values) - 1) / 2
        for value in values
    ]
    ranks = rank([pair["plan"] for pair in pairs]), rank([pair["run"] for pair in pairs])
    return statistics.correlation(*ranks)


def _plan(words: list[str]):
    from jtrain.config.resolve import resolve
    from jtrain.inspect.plan.plan import make_plan
    from jtrain.inspect.plan.topology import find_topology
    from jtrain.train.program import set_up

    config = resolve(Path(CONFIG), words).config
    return set_up(config), make_plan(config, find_topology(f"cpu:{DEVICES}"))


def _ready(tree):
    import jax

    return jax.block_until_ready(tree)


def _status(name: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{name}:"):
            return 1024 * int(line.split()[1])
    raise RuntimeError(name)


def _in_process(mode: str, words: list[str]) -> dict[str, float]:
    flags = f"--xla_force_host_platform_device_count={DEVICES}"
    env = {**os.environ, "JAX_PLATFORMS": "cpu", "XLA_FLAGS": flags}
    command = [sys.executable, __file__, mode, json.dumps(words)]
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=True)
    return json.loads(done.stdout.splitlines()[-1])


def main() -> None:
    """Print a table, or the figures of one config as JSON."""
    mode = sys.argv[1] if len(sys.argv) > 1 else "memory"
    measure, cases = (measure_memory, MEMORY) if mode == "memory" else (measure_time, TIMES)
    if len(sys.argv) > 2:
        print(json.dumps(measure(json.loads(sys.argv[2]))))
        return
    unit = 1e-9 if mode == "memory" else 1e3
    print("| config | plan | run | plan / run |\n|---|---:|---:|---:|")
    pairs = []
    for name, words in cases.items():
        found = _in_process(mode, words)
        pairs.append(found)
        plan, run = (found[key] * unit for key in ("plan", "run"))
        print(f"| {name} | {plan:.2f} | {run:.2f} | {plan / run:.2f} |", flush=True)
    if mode == "times":
        print(f"\nrank correlation {rank_correlation(pairs):.2f}")


if __name__ == "__main__":
    main()
