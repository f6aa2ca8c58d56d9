"""Absent devices, by a name such as `v5e:4x4`, `2*v5p:4x4x4` or `cpu:8`."""

import os
from collections.abc import Sequence
from typing import Any, NamedTuple

from jtrain.distributed.cluster import variables
from jtrain.distributed.topology_name import TopologyName
from jtrain.errors import ConfigError
from jtrain.errors.spelling import did_you_mean
from jtrain.inspect.plan.compiler_logging import suppress_stderr


class Topology(NamedTuple):
    """Devices to compile for."""

    name: str
    devices: Sequence[Any]  # jax devices
    limit: int  # bytes of memory per device; 0: unknown


def find_topology(name: str) -> Topology:
    """Return the devices of a topology name.

    `v5e:4x4` is a TPU slice, `2*v5e:4x4` two slices, `cpu:8` eight virtual devices of this machine.

    Raises:
        ConfigError: if the name is invalid, or the compiler for it is not installed.
    """
    from jtrain.parallel.chips import CHIPS
    from jtrain.parallel.memory_estimate import device_memory

    parsed = TopologyName.parse(name)
    slices, kind, shape = parsed.count, parsed.kind, parsed.shape
    if kind == "cpu":
        return _cpu(name, slices, shape)
    if kind not in CHIPS:
        kinds = ["cpu", *CHIPS]
        suggestion = did_you_mean(kind, kinds)
        raise ConfigError(
            f"--topology {name}: there is no compiler for {kind!r} here; kinds: "
            f"{', '.join(kinds)}{suggestion or '.'}"
        )
    devices = _tpu(name, slices, kind, shape)
    return Topology(name, devices, device_memory(devices))


def prepare_environment(name: str) -> None:
    """Make JAX compute on the CPU, with as many devices as the topology asks for.

    Call it before importing JAX. Environment variables that are set already stay.
    """
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    kind, _, count = name.partition(":")
    if kind == "cpu" and count.isdecimal() and not variables.sets_cpu_devices(os.environ):
        os.environ[variables.NUMBER] = count


def _cpu(name: str, slices: int, shape: str) -> Topology:
    import jax

    if slices > 1 or "x" in shape:
        raise ConfigError(f"--topology {name}: a CPU has one number of devices; write cpu:8.")
    if len(jax.devices("cpu")) < int(shape):
        raise ConfigError(
            f"--topology {name}: this process has {len(jax.devices('cpu'))} CPU devices. Set "
            f"XLA_FLAGS=--xla_force_host_platform_device_count={shape}."
        )
    return Topology(name, jax.devices("cpu")[: int(shape)], 0)


def _tpu(name: str, slices: int, kind: str, shape: str) -> Sequence[Any]:
    # libtpu reads both on loading: no query of the machine type, several processes at once.
    os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")
    os.environ.setdefault("ALLOW_MULTIPLE_LIBTPU_LOAD", "1")
    from jax.experimental import topologies

    options = {"num_slices": slices} if slices > 1 else {}
    try:
        with suppress_stderr():  # libtpu complains about the missing TPU
            description = topologies.get_topology_desc(
                platform="tpu", topology_name=f"{kind}:{shape}", **options
            )
    except Exception as error:  # libtpu raises several types
        message = str(error).splitlines()[0]
        said = message.lower()
        if "not installed" in said or ("libtpu" in said and "not" in said):
            raise ConfigError(
                f"--topology {name}: the TPU compiler is not installed: pip install 'jtrain[plan]'"
            ) from error
        raise ConfigError(
            f"--topology {name}: the compiler knows no such slice ({message[:200]}). Slices of v5e "
            f"and v6e are 1x1, 2x2, 4x4, 4x8, 8x8, 8x16, 16x16; of v5p and v4 2x2x1, 2x2x2, 2x2x4, "
            f"2x4x4, 4x4x4 and larger."
        ) from error
    return description.devices
