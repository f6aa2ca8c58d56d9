"""Devices that are not here, by a name such as `v5e:4x4`, `2*v5p:4x4x4` or `cpu:8`."""

import os
import re
from collections.abc import Sequence
from typing import Any, NamedTuple

from jtrain.config.suggestions import did_you_mean
from jtrain.distributed.cluster import cpu_devices
from jtrain.errors import ConfigError
from jtrain.inspect.plan.compiler_logging import quiet_stderr

SPELT = re.compile(r"(?:(\d+)\*)?([a-z]\w*):(\d+(?:x\d+)*)")


class Topology(NamedTuple):
    """Devices to compile for."""

    name: str
    devices: Sequence[Any]  # of jax
    limit: int  # bytes of memory a device; 0 where it is not known


def topology(name: str) -> Topology:
    """The devices that a name stands for.

    `v5e:4x4` is a slice of a TPU, `2*v5e:4x4` two of them, `cpu:8` eight parts of this machine.

    Raises:
        ConfigError: for a name that is none, or if the compiler for it is not installed.
    """
    from jtrain.parallel.memory import CHIPS, device_memory

    found = SPELT.fullmatch(name)
    if found is None:
        raise ConfigError(
            f"--topology {name} is no topology: write KIND:SHAPE, such as v5e:4x4, "
            f"2*v5e:4x4 for two slices, or cpu:8."
        )
    slices, kind, shape = int(found[1] or 1), found[2], found[3]
    if kind == "cpu":
        return _cpu(name, slices, shape)
    if kind not in CHIPS:
        kinds = ["cpu", *CHIPS]
        near = did_you_mean(kind, kinds)
        raise ConfigError(
            f"--topology {name}: there is no compiler for {kind!r} here; kinds: "
            f"{', '.join(kinds)}{near or '.'}"
        )
    devices = _tpu(name, slices, kind, shape)
    return Topology(name, devices, device_memory(devices))


def prepare(name: str) -> None:
    """Says what JAX reads when it is imported: it computes on the CPU, in as many parts as asked.

    It changes nothing that the environment says already.
    """
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    kind, _, count = name.partition(":")
    if kind == "cpu" and count.isdecimal() and not cpu_devices.is_said(os.environ):
        os.environ[cpu_devices.NUMBER] = count


def _cpu(name: str, slices: int, shape: str) -> Topology:
    import jax

    if slices > 1 or "x" in shape:
        raise ConfigError(f"--topology {name}: a CPU has one number of parts; write cpu:8.")
    if len(jax.devices("cpu")) < int(shape):
        raise ConfigError(
            f"--topology {name}: this process has {len(jax.devices('cpu'))} parts of the CPU. Set "
            f"XLA_FLAGS=--xla_force_host_platform_device_count={shape}."
        )
    return Topology(name, jax.devices("cpu")[: int(shape)], 0)


def _tpu(name: str, slices: int, kind: str, shape: str) -> Sequence[Any]:
    # Read when libtpu is loaded: no machine is asked what it is, several may compile side by side.
    os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")
    os.environ.setdefault("ALLOW_MULTIPLE_LIBTPU_LOAD", "1")
    from jax.experimental import topologies

    sliced = {"num_slices": slices} if slices > 1 else {}
    try:
        with quiet_stderr():  # libtpu misses its TPU there
            described = topologies.get_topology_desc(
                platform="tpu", topology_name=f"{kind}:{shape}", **sliced
            )
    except Exception as error:  # whatever libtpu throws, in several types
        said = str(error).splitlines()[0]
        if "libtpu" in said and "not" in said.lower():
            raise ConfigError(
                f"--topology {name}: the TPU compiler is not installed: pip install 'jtrain[plan]'"
            ) from error
        raise ConfigError(
            f"--topology {name}: the compiler knows no such slice ({said[:200]}). Those of v5e and "
            f"v6e are 1x1, 2x2, 4x4, 4x8, 8x8, 8x16, 16x16; of v5p and v4 2x2x1, 2x2x2, 2x2x4, "
            f"2x4x4, 4x4x4 and larger."
        ) from error
    return described.devices
