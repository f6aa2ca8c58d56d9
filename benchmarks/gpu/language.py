"""Language models: a step of ours beside PyTorch's and its own variants, and memory of the plan."""

import contextlib
import functools
import itertools
import json
import os
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any
from unittest import mock

import jax
from pairs import ratio, take_turns
from sizes import LANGUAGE, TURNS
from turns import Peer, TorchPeer, clocked, compare

from jtrain.config.resolve import resolve
from jtrain.parallel.chips import peak_flops
from jtrain.train.program import Program, set_up
from jtrain.train.summary import bound_step_flops

CONFIG = str(Path(__file__).parent.parent.parent / "configs" / "gpt2.yaml")
BATCHES = 8  # made before the clock starts, for both


def words(kind: str, variant: str, sizes: str, chunk: int = 128, narrow: bool = True) -> list[str]:
    """Return the values of a variant: cudnn, xla or fp8 (with cuDNN's attention).

    Args:
        chunk: positions of a row whose logits exist at once.
        narrow: whether logits are bfloat16, as PyTorch's are under autocast.
    """
    attention = "xla" if variant == "xla" or sizes == "rehearsal" else "cudnn"
    precision = "fp8" if variant == "fp8" else "bf16"
    size = LANGUAGE[sizes][kind]
    given = f"model.attention={attention}", f"precision.kind={precision}", "steps=100000"
    logits = f"logits_chunk={chunk}", f"precision.logits={_LOGITS[narrow]}"
    return size.words(*given, *logits)


_LOGITS = {False: "float32", True: "bfloat16"}


def language(kind: str, variant: str, sizes: str, torch: str) -> dict[str, Any]:
    """Return tokens a second and MFU of both."""
    size = LANGUAGE[sizes][kind]
    model = {**size.model, "context": size.context}
    peer = TorchPeer(torch, {"model": "language", "sizes": model, "batch": size.rows})
    program = set_up(resolve(CONFIG, words(kind, variant, sizes)).config)
    take = trainer(program)
    flops, peak = bound_step_flops(program)[0].model, peak_flops(program.resolved.devices)
    found = compare(
        clocked(take),
        sizes,
        peer,
        work=size.rows * size.context,
        unit="tokens",
        flops=flops / peak if flops and peak else 0.0,
    )
    peak_bytes = (program.resolved.devices[0].memory_stats() or {}).get("peak_bytes_in_use")
    if peak_bytes:
        found["rows"].append({"what": "jtrain's peak", "value": peak_bytes / 1e9, "unit": "GB"})
    if sizes == "rehearsal":
        found["notes"].append("rehearsed with XLA's attention: cuDNN's needs a GPU")
    return found


CURES = {
    "as it was: the guard by a branch, float32 logits, 128 positions at a time": (True, 128, False),
    "the guard by a select": (False, 128, False),
    "and logits in bfloat16": (False, 128, True),
    "and all positions at once": (False, 1 << 20, True),
}
"""Whether the guard is a branch, positions of a row whose logits exist at once, bfloat16 logits."""


def cures(kind: str, sizes: str) -> dict[str, Any]:
    """Return the time of a step with each cure, over the step without any."""
    size, runs = LANGUAGE[sizes][kind], {}
    turns, steps = TURNS[sizes]
    for name, (branch, chunk, narrow) in CURES.items():
        chunk = min(chunk, size.context)
        with _guard_by_a_branch() if branch else contextlib.nullcontext():
            program = set_up(resolve(CONFIG, words(kind, "cudnn", sizes, chunk, narrow)).config)
            turn = clocked(trainer(program))
            turn(1)
        runs[name] = lambda turn=turn: turn(steps)
    times = take_turns(runs, turns, warmup=1 if sizes == "rehearsal" else 2)
    first, rows = next(iter(times.values())), []
    for name, seconds in times.items():
        tokens = size.rows * size.context / statistics.median(seconds)
        rows.append({"what": name, "value": tokens, "unit": "tokens/s"})
        rows.append({"what": "its time over the first's", "value": str(ratio(seconds, first))})
    return {"rows": [{"unit": "", **row} for row in rows], "notes": []}


FLAGS: dict[str, dict[str, str]] = {
    "xla_gpu_enable_triton_gemm=false": {"XLA_FLAGS": "--xla_gpu_enable_triton_gemm=false"},
    "xla_gpu_graph_min_graph_size=1": {"XLA_FLAGS": "--xla_gpu_graph_min_graph_size=1"},
    "JAX_OPTIMIZATION_LEVEL=O1": {"JAX_OPTIMIZATION_LEVEL": "O1"},
    "cuDNN's GEMM fusion": {"XLA_FLAGS": "--xla_gpu_cudnn_gemm_fusion_level=2"},
    "cuDNN's layer norm": {"XLA_FLAGS": "--xla_gpu_enable_cudnn_layer_norm=true"},
}
"""Variables that a process has more than the default; never COLLECTIVES among command buffers."""


def flags(kind: str, sizes: str) -> dict[str, Any]:
    """Return the time of a step with each flag over the default's, two processes in turns.

    A flag that this jaxlib does not take ends its process: its row says so.
    """
    turns, steps = TURNS[sizes]
    command = [sys.executable, __file__, kind, sizes]
    default, rows = Peer(command), []
    default.wait()
    for name, variables in FLAGS.items():
        given = f"{os.environ.get('XLA_FLAGS', '')} {variables.get('XLA_FLAGS', '')}".strip()
        peer = Peer(command, {**variables, "XLA_FLAGS": given})
        over = "not taken by this jaxlib"
        if peer.wait():
            runs = {
                who: functools.partial(p.turn, steps)
                for who, p in (("flag", peer), ("default", default))
            }
            flag, other = take_turns(runs, turns).values()
            over = str(ratio(flag, other))
        peer.end()
        rows.append({"what": f"{name}: time over the default's", "value": over, "unit": ""})
    default.end()
    return {"rows": rows, "notes": []}


def serve(kind: str, sizes: str) -> None:
    """Take the steps that each line of the input asks for, as a `Peer` does."""
    turn = clocked(trainer(set_up(resolve(CONFIG, words(kind, "cudnn", sizes)).config)))
    turn(1)
    print("compiled", flush=True)
    for line in sys.stdin:
        print(turn(int(line)), flush=True)


def _guard_by_a_branch() -> contextlib.AbstractContextManager[Any]:
    """Compile the guard of the update for this device as for a TPU."""
    return mock.patch("jtrain.core.finite._by_platform", lambda branch, select, sharded: branch())


def trainer(program: Program) -> Any:
    """Return a function of a number that takes a step, on batches that are on the device."""
    step, state = program.compile_step(), [program.initial_state()]
    batches = [program.place(program.batches().stacked[i]) for i in range(BATCHES)]

    def take(number: int) -> Any:
        state[0], metrics = step(state[0], batches[number % BATCHES])
        return metrics["loss"].total

    return take


def memory(kind: str, sizes: str) -> dict[str, Any]:
    """Return the peak of two steps, and the plan's for such a GPU."""
    given = words(kind, "cudnn", sizes)
    program = set_up(resolve(CONFIG, given).config)
    take = trainer(program)
    for i in range(2):
        jax.block_until_ready(take(i))
    device = program.resolved.devices[0]
    stats = device.memory_stats() or {}
    topology = _topology(device)
    plan = _plan(given, topology) / 1e9
    rows = [{"what": f"plan, {topology}", "value": plan, "unit": "GB"}]
    if "peak_bytes_in_use" not in stats:
        return {"rows": rows, "notes": [f"{device.device_kind} counts no peak of its memory"]}
    peak = stats["peak_bytes_in_use"] / 1e9
    rows.append({"what": "peak_bytes_in_use", "value": peak, "unit": "GB"})
    rows.append({"what": "plan over peak", "value": plan / peak, "unit": ""})
    return {"rows": rows}


def _topology(device: Any) -> str:
    if device.platform == "cpu":
        return "cpu:1"
    kinds = itertools.chain(("h200", "h100", "b200", "a100"), ("h100",))
    return next(k for k in kinds if k.upper() in device.device_kind or k == "h100") + ":1"


def _plan(given: list[str], topology: str) -> float:
    command = [sys.executable, "-m", "jtrain", "plan", CONFIG, *given, "--topology", topology]
    run = subprocess.run(
        [*command, "--json"],
        env={**os.environ, "JAX_PLATFORMS": "cpu"},
        capture_output=True,
        text=True,
    )
    if run.returncode:
        raise RuntimeError(f"jtrain plan: {run.stderr[-1500:]}")
    return json.loads(run.stdout.splitlines()[-1])["memory"]["peak"]


if __name__ == "__main__":
    serve(*sys.argv[1:])
