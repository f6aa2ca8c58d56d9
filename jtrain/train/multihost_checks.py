"""A run's processes, joined: what they must have in common, and whether they have."""

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
from jtrain.config.command_line import spell
from jtrain.config.dump import flatten, to_plain
from jtrain.distributed.cluster import Cluster, detect, start
from jtrain.distributed.heartbeat.exit_alone import fail_alone
from jtrain.errors import ConfigError
from jtrain.errors.user_code import api_boundary
from jtrain.train.experiment import RunConfig
from jtrain.train.run_dir import PACKAGES, RunDir, version_of

PACKAGE = Path(__file__).parents[1]
# What of the environment changes numbers or devices.
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
    """Make one JAX of the processes that a launcher started; a process that is alone stays so.

    For the first line of a script in which arrays are made before `jt.fit` (an nnx module is one):
    JAX has to know of the other processes before it is used. `jt.run` and `jt.fit` do the same.

    Args:
        timeout: seconds to wait for all of them.

    Raises:
        PeerError: for a process that does not come.
        ConfigError: for variables that contradict one another, processes that differ, or a JAX that
            was used before.
    """
    if jax.distributed.is_initialized():
        fail_alone()
        return Cluster(kind="by hand", processes=jax.process_count(), index=jax.process_index())
    cluster = detect(os.environ)
    if cluster.processes > 1:
        script = Path(getattr(sys.modules["__main__"], "__file__", None) or os.devnull)
        code = {f"code {script.name}": _digest(script)} if script.is_file() else {}
        start(cluster, _surroundings() | code, timeout=timeout)
        refuse_unlike_devices()
    return cluster


def join(config: RunConfig, path: Path | None, *, trains: bool = True) -> Cluster:
    """The processes that this one belongs to, once they are one JAX; before it is used.

    They compare their configs, code, packages and devices, and what they see of the run in `path`,
    if it is kept.

    Raises:
        PeerError: for a process that does not come within `parallel.start_timeout` seconds.
        ConfigError: for variables that contradict one another, or processes that differ: which,
            and how.
    """
    if jax.distributed.is_initialized():
        fail_alone()
        return Cluster(kind="by hand", processes=jax.process_count(), index=jax.process_index())
    cluster = detect(os.environ)
    if trains and cluster.role != "trains":
        raise ConfigError(
            f"{cluster.kind} says that this process only evaluates ({cluster.spelt}), and a run is "
            f"evaluated by those that train. Leave this process out; jtrain eval "
            f"{path.name if path else 'NAME'} measures the newest checkpoint at any time."
        )
    if cluster.processes > 1:
        start(cluster, facts(config, path), timeout=config.parallel.start_timeout)
        refuse_unlike_devices()
    return cluster


def facts(config: RunConfig, path: Path | None) -> dict[str, str]:
    """What all processes of a run must have the same, by name."""
    return {
        **{f"config {key}": spell(value) for key, value in flatten(to_plain(config)).items()},
        **_surroundings(),
        **(_stands(path) if path else {}),
        **_own_code(type(config)),
    }


def _surroundings() -> dict[str, str]:
    """What processes of one JAX must have the same whatever they run, by name."""
    return {
        **{f"package {name}": version_of(name) or "none" for name in PACKAGES},
        "python": platform.python_version(),
        **{f"variable {name}": os.environ.get(name) or "none" for name in VARIABLES},
        **{
            f"code jtrain/{file.relative_to(PACKAGE)}": _digest(file)
            for file in sorted(PACKAGE.rglob("*.py"))
        },
    }


def refuse_unlike_devices() -> None:
    """Raises ConfigError, in all processes, if some have other devices than the first."""
    by_process: dict[int, list[str]] = {}
    for device in jax.devices():
        by_process.setdefault(device.process_index, []).append(device.device_kind)
    first = sorted(by_process[0])
    for process, kinds in sorted(by_process.items()):
        if sorted(kinds) != first:
            raise ConfigError(
                f"process 0 has {_counted(first)} and process {process} {_counted(kinds)}. Give "
                f"each process as many devices of one kind (JAX_NUM_CPU_DEVICES on a CPU, "
                f"CUDA_VISIBLE_DEVICES on GPUs)."
            )


def refuse_unshared(directory: RunDir) -> None:
    """Raises ConfigError, in all processes, if some do not see what the first one wrote.

    Call it after `directory.begin`.
    """
    if jax.process_count() == 1:
        return
    multihost_utils.sync_global_devices("jtrain: the directory was begun")
    seen = multihost_utils.process_allgather(np.array(directory.config.exists()))
    if blind := np.flatnonzero(~np.asarray(seen)).tolist():
        raise ConfigError(
            f"{directory.path} was begun by process 0, and process {', '.join(map(str, blind))} "
            f"does not see it. Run where all processes share a file system: the run's directory is "
            f"runs/NAME below where you are."
        )


def _stands(path: Path) -> Mapping[str, str]:
    """What is to be seen of the run: else one process would go on and another begin."""
    there = RunDir(path)
    newest = CheckpointManager(there.checkpoints, owner=there.owner()).newest()
    said = there.stands().get("status", "nothing")
    return {f"run {path}": said if newest is None else f"{said} at step {newest}"}


def _own_code(config: type) -> dict[str, str]:
    """Return a digest of the experiment's file, by name; nothing where it is jtrain's."""
    own = getattr(sys.modules.get(config.__module__), "__file__", None)
    if not own or Path(own).is_relative_to(PACKAGE):
        return {}
    return {f"code {Path(own).name}": _digest(Path(own))}


def _digest(file: Path) -> str:
    return hashlib.sha256(file.read_bytes()).hexdigest()[:12]


def _counted(kinds: list[str]) -> str:
    return ", ".join(f"{kinds.count(kind)} x {kind}" for kind in dict.fromkeys(kinds)) or "none"
