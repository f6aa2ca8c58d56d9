"""Multi-process checks: the processes of a run are joined, and must not differ."""

import dataclasses
import hashlib
import os
import platform
import sys
from collections.abc import Mapping
from pathlib import Path

import jax
import numpy as np
from jax.experimental import multihost_utils

from jtrain.checkpoint import CheckpointManager
from jtrain.config.dump import flatten, to_plain
from jtrain.config.schema import format_value
from jtrain.distributed.cluster import Cluster, detect, start
from jtrain.distributed.cluster.rendezvous import difference
from jtrain.distributed.heartbeat import connect_heartbeat
from jtrain.distributed.multihost import all_gather
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
    connect_heartbeat()
    if jax.distributed.is_initialized():
        fail_alone()
        return Cluster(kind="by hand", processes=jax.process_count(), index=jax.process_index())
    cluster = detect(os.environ)
    if cluster.servers:
        raise _servers_in(cluster)
    if cluster.processes > 1:
        script = Path(getattr(sys.modules["__main__"], "__file__", None) or os.devnull)
        code = {f"code {script.name}": digest_file(script)} if script.is_file() else {}
        start(cluster, _environment() | code, timeout=timeout)
        check_devices()
    return cluster


def join_run(config: RunConfig, path: Path | None, *, trains: bool = True) -> Cluster:
    """Join the processes of a run into one JAX, before JAX is used, and return their cluster.

    A CPU is split into the devices of the config. The processes compare their configs, code,
    packages and devices, and the status of the run in `path`, if it has a directory.

    Raises:
        PeerError: for a process that does not join within `parallel.start_timeout` seconds.
        ConfigError: for contradictory variables, or processes that differ, with the differences.
    """
    connect_heartbeat()
    split_cpu(getattr(config.parallel, "devices", 0))
    if jax.distributed.is_initialized():
        fail_alone()
        return Cluster(kind="by hand", processes=jax.process_count(), index=jax.process_index())
    cluster = detect(os.environ)
    if getattr(config.parallel, "engine", "") == "cluster":  # each process has a JAX of its own
        return dataclasses.replace(cluster, processes=1, index=0, warning="")
    if cluster.servers:
        raise _servers_in(cluster)
    if trains and cluster.role != "trains":
        raise ConfigError(
            f"{cluster.kind} says that this process only evaluates ({cluster.variables}), and "
            f"jtrain run trains. Start in its place: jtrain eval {path.name if path else 'NAME'} "
            f"--watch. Or start no such process: the processes that train evaluate the run too."
        )
    if cluster.processes > 1:
        start(cluster, process_facts(config, path), timeout=config.parallel.start_timeout)
        check_devices()
    return cluster


def _servers_in(cluster: Cluster) -> ConfigError:
    workers = cluster.processes - 1 - cluster.servers
    return ConfigError(
        f"{cluster.kind} has tasks of type ps, parameter servers, which one strategy has. Set "
        f"parallel.kind=server parallel.engine=cluster parallel.shards={cluster.servers} "
        f"parallel.workers={workers} for all tasks; or unset {cluster.kind} to train alone."
    )


def check_joined(config: RunConfig, path: Path) -> None:
    """Compare the processes of a run that JAX has joined already, as `join_run` does beforehand.

    Every process calls this at the same time.

    Raises:
        ConfigError: in all processes, with the differences.
    """
    facts = all_gather(process_facts(config, path))
    for index, other in enumerate(facts):
        if error := difference(facts[0], other, index):
            raise error
    check_devices()


def process_facts(config: RunConfig, path: Path | None) -> dict[str, str]:
    """Return the facts that must be equal in all processes of a run, by name."""
    return {
        **{
            f"config {key}": format_value(value) for key, value in flatten(to_plain(config)).items()
        },
        **_environment(),
        **(_status(path) if path else {}),
        **_own_code(type(config)),
    }


def code_facts(config: RunConfig) -> dict[str, str]:
    """Return the facts about packages and code, which change what a process computes."""
    facts = {**_environment(), **_own_code(type(config))}
    return {name: fact for name, fact in facts.items() if name.startswith(("package ", "code "))}


def _environment() -> dict[str, str]:
    """Return the facts that must be equal in all processes of any program, by name."""
    return {
        **{f"package {name}": installed_version(name) or "none" for name in PACKAGES},
        "python": platform.python_version(),
        **{f"variable {name}": os.environ.get(name) or "none" for name in VARIABLES},
        **{
            f"code jtrain/{file.relative_to(PACKAGE)}": digest_file(file)
            for file in sorted(PACKAGE.rglob("*.py"))
        },
    }


def check_devices() -> None:
    """Raise ConfigError, in all processes, unless all have the same devices."""
    by_process: dict[int, list[str]] = {}
    for device in jax.devices():
        by_process.setdefault(device.process_index, []).append(device.device_kind)
    first = sorted(by_process[0])
    for process, kinds in sorted(by_process.items()):
        if sorted(kinds) != first:
            raise ConfigError(
                f"process 0 has {_format_counts(first)} and process {process} "
                f"{_format_counts(kinds)}. Give each process as many devices of one kind "
                f"(JAX_NUM_CPU_DEVICES on a CPU, CUDA_VISIBLE_DEVICES on GPUs)."
            )


def check_shared_directory(directory: RunDir) -> None:
    """Raise ConfigError, in all processes, unless all see the files of the first one.

    Call it after `directory.begin`.
    """
    if jax.process_count() == 1:
        return
    multihost_utils.sync_global_devices("jtrain: the directory was begun")
    visible = multihost_utils.process_allgather(np.array(directory.config.exists()))
    if missing := np.flatnonzero(~np.asarray(visible)).tolist():
        raise ConfigError(
            f"{directory.path} was created by process 0, and process {', '.join(map(str, missing))}"
            f" does not see it. Run in a file system that all processes share: the run's directory "
            f"is runs/NAME below the current directory."
        )


def _status(path: Path) -> Mapping[str, str]:
    """Return the status of the run, so that all processes resume or all start anew."""
    run_dir = RunDir(path)
    newest = CheckpointManager(run_dir.checkpoints, owner=run_dir.owner()).newest()
    status = run_dir.facts().get("status", "nothing")
    return {f"run {path}": status if newest is None else f"{status} at step {newest}"}


def _own_code(config: type) -> dict[str, str]:
    """Return a digest of the experiment's file, by name; {} for a file of jtrain."""
    own = getattr(sys.modules.get(config.__module__), "__file__", None)
    if not own or Path(own).is_relative_to(PACKAGE):
        return {}
    return {f"code {Path(own).name}": digest_file(Path(own))}


def digest_file(file: Path) -> str:
    """Return the first 12 characters of the SHA-256 of a file."""
    return hashlib.sha256(file.read_bytes()).hexdigest()[:12]


def _format_counts(kinds: list[str]) -> str:
    return ", ".join(f"{kinds.count(kind)} x {kind}" for kind in dict.fromkeys(kinds)) or "none"
