"""Processes of a run: they are joined into one JAX, and must not differ."""

import collections
import dataclasses
import hashlib
import os
import platform
import sys
from collections.abc import Callable, Mapping
from pathlib import Path

import jax

from jtrain.checkpoint import CheckpointManager
from jtrain.config.dump import flatten, to_plain
from jtrain.config.schema import format_value
from jtrain.distributed.cluster import Cluster, detect, start
from jtrain.distributed.heartbeat import connect_heartbeat
from jtrain.distributed.multihost import all_gather, barrier
from jtrain.distributed.shutdown import fail_alone
from jtrain.errors import ConfigError
from jtrain.errors.user_code import api_boundary
from jtrain.io.environment import installed_version
from jtrain.parallel.devices import split_cpu
from jtrain.train.experiment import RunConfig
from jtrain.train.run_dir import PACKAGES, RunDir

PACKAGE = Path(__file__).parents[1]
# Environment variables that change numbers or devices.
VARIABLES = (
    "JAX_PLATFORMS",
    "JAX_NUM_CPU_DEVICES",
    "JAX_ENABLE_X64",
    "JAX_DEFAULT_MATMUL_PRECISION",
    "JAX_DEFAULT_PRNG_IMPL",
    "JAX_THREEFRY_PARTITIONABLE",
    "XLA_FLAGS",
)


@api_boundary
def join_processes(timeout: float = 60.0) -> Cluster:
    """Join the processes that a launcher started into one JAX; a single process is unchanged.

    Call this in the first line of a script that makes arrays (an nnx module, say) before `jt.fit`:
    JAX must know of the other processes before it is used. `jt.run` and `jt.fit` do the same.

    Args:
        timeout: seconds to wait for all processes.

    Raises:
        PeerError: for a process that does not join.
        ConfigError: for contradictory variables, processes that differ, or a JAX that was used
            before.
    """
    script = Path(getattr(sys.modules["__main__"], "__file__", None) or os.devnull)
    return _join(lambda: _environment() | _digest_code(script), timeout)


def join_run(config: RunConfig, path: Path | None, *, trains: bool = True) -> Cluster:
    """Join the processes of a run into one JAX, before JAX is used, and return their cluster.

    A CPU is split into the devices of the config. The processes compare their configs, code,
    packages and devices, and the status of the run in `path`, if it has a directory.

    Raises:
        PeerError: for a process that does not join within `parallel.start_timeout` seconds.
        ConfigError: for contradictory variables, or processes that differ, with the differences.
    """
    split_cpu(getattr(config.parallel, "devices", 0))
    if getattr(config.parallel, "engine", "") == "cluster":  # each process has a JAX of its own
        connect_heartbeat()
        return dataclasses.replace(detect(os.environ), processes=1, index=0, warning="")
    evaluator = f"jtrain eval {path.name if path else 'NAME'} --watch" if trains else ""
    facts = lambda: process_facts(config, path)
    return _join(facts, config.parallel.start_timeout, evaluator)


def _join(facts: Callable[[], dict[str, str]], timeout: float, evaluator: str = "") -> Cluster:
    """Join the processes that the environment names, if they have the same facts.

    Args:
        evaluator: what to type for a process that only evaluates; empty: it may join.
    """
    connect_heartbeat()
    if jax.distributed.is_initialized():
        fail_alone()
        return Cluster(kind="by hand", processes=jax.process_count(), index=jax.process_index())
    cluster = detect(os.environ)
    if cluster.servers:
        raise ConfigError(
            f"{cluster.kind} has tasks of type ps, parameter servers, which one strategy has. Set "
            f"parallel.kind=server parallel.engine=cluster parallel.shards={cluster.servers} "
            f"parallel.workers={cluster.processes - 1 - cluster.servers} for all tasks; or unset "
            f"{cluster.kind} to train alone."
        )
    if evaluator and cluster.role != "trains":
        raise ConfigError(
            f"{cluster.kind} says that this process only evaluates ({cluster.variables}), and "
            f"jtrain run trains. Start in its place: {evaluator}. Or start no such process: the "
            f"processes that train evaluate the run too."
        )
    if cluster.processes > 1:
        start(cluster, facts(), timeout=timeout)
        check_devices()
    return cluster


def check_devices() -> None:
    """Raise ConfigError, in all processes, unless all have the same devices."""
    by_process: dict[int, collections.Counter[str]] = {}
    for device in jax.devices():
        by_process.setdefault(device.process_index, collections.Counter())[device.device_kind] += 1
    first, words = by_process[0], lambda kinds: ", ".join(f"{n} x {k}" for k, n in kinds.items())
    for process, kinds in sorted(by_process.items()):
        if kinds != first:
            raise ConfigError(
                f"process 0 has {words(first)} and process {process} {words(kinds)}. Give each "
                f"process as many devices of one kind (JAX_NUM_CPU_DEVICES on a CPU, "
                f"CUDA_VISIBLE_DEVICES on GPUs)."
            )


def check_shared_directory(directory: RunDir) -> None:
    """Raise ConfigError, in all processes, unless all see the files of the first one.

    Call it after `directory.begin`.
    """
    barrier()
    visible = all_gather(directory.config.exists())
    if missing := [str(index) for index, found in enumerate(visible) if not found]:
        raise ConfigError(
            f"{directory.path} was created by process 0, and process {', '.join(missing)} does not "
            f"see it. Run in a file system that all processes share: the run's directory is "
            f"runs/NAME below the current directory."
        )


def process_facts(config: RunConfig, path: Path | None) -> dict[str, str]:
    """Return the facts that must be equal in all processes of a run, by name."""
    values = flatten(to_plain(config)).items()
    return {
        **{f"config {key}": format_value(value) for key, value in values},
        **_environment(),
        **(_status(RunDir(path)) if path else {}),
        **_own_code(config),
    }


def code_facts(config: RunConfig) -> dict[str, str]:
    """Return the facts about packages and code, which change what a process computes."""
    facts = {**_environment(), **_own_code(config)}
    return {name: fact for name, fact in facts.items() if name.startswith(("package ", "code "))}


def _environment() -> dict[str, str]:
    return {
        **{f"package {name}": installed_version(name) or "none" for name in PACKAGES},
        "python": platform.python_version(),
        **{f"variable {name}": os.environ.get(name) or "none" for name in VARIABLES},
        **_digest_code(*sorted(PACKAGE.rglob("*.py"))),
    }


def _status(run_dir: RunDir) -> Mapping[str, str]:
    """Return the status of the run, so that all processes resume or all start anew."""
    newest = CheckpointManager(run_dir.checkpoints, owner=run_dir.owner()).newest()
    status = run_dir.facts().get("status", "nothing")
    at = "" if newest is None else f" at step {newest}"
    return {f"run {run_dir.path}": f"{status}{at}"}


def _own_code(config: RunConfig) -> dict[str, str]:
    own = Path(getattr(sys.modules.get(type(config).__module__), "__file__", None) or PACKAGE)
    return {} if own.is_relative_to(PACKAGE) else _digest_code(own)


def _digest_code(*files: Path) -> dict[str, str]:
    name = lambda x: x.relative_to(PACKAGE.parent) if x.is_relative_to(PACKAGE) else x.name
    digest = lambda x: hashlib.sha256(x.read_bytes()).hexdigest()[:12]
    return {f"code {name(file)}": digest(file) for file in files if file.is_file()}
