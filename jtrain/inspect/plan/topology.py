"""Absent devices, by a name such as `v5e:4x4`, `2*v5p:4x4x4`, `2*h100:8` or `cpu:8`."""

import importlib.util
import math
import os
import re
from collections.abc import Sequence
from typing import Any, NamedTuple

from jtrain.distributed.cluster.cluster import NUMBER, sets_cpu_devices
from jtrain.distributed.manifests.machines import TopologyName
from jtrain.errors import ConfigError
from jtrain.errors.spelling import did_you_mean
from jtrain.inspect.plan.compiler_logging import suppress_stderr
from jtrain.inspect.plan.gpu_targets import FRACTION, GPU_TARGETS
from jtrain.io.environment import installed_version

# Slices of each kind of TPU that libtpu 0.0.51 compiles for.
_FLAT = ("1x1", "2x2", "2x4", "4x4", "4x8", "8x8", "8x16", "16x16")
_DEEP = ("2x2x1", "2x2x2", "2x2x4", "2x4x4", "4x4x4", "4x4x8", "4x8x8", "8x8x8", "8x8x16")
_FLAT_KINDS = ("v2", "v3", "v5e", "v6e")  # their chips have links in two directions
SLICES = {
    "v2": ("2x2", "4x4", "4x8", "8x8", "8x16", "16x16"),
    "v3": ("2x2", "4x4", "4x8", "8x8", "8x16", "16x16"),
    **dict.fromkeys(("v5e", "v6e"), _FLAT),
    **dict.fromkeys(("v4", "v5p", "tpu7x"), _DEEP),
}
OLDEST_LIBTPU = (0, 0, 40)  # the extra `plan` in pyproject.toml
MACHINE_GPUS = (1, 2, 4, 8)


class Topology(NamedTuple):
    """Devices to compile for."""

    name: str
    devices: Sequence[Any]  # jax devices
    limit: int  # bytes of memory per device; 0: unknown
    compiler: str = ""  # the compiler and its version


def find_topology(name: str) -> Topology:
    """Return the devices of a topology name.

    `v5e:4x4` is a TPU slice, `2*v5e:4x4` two slices, `h100:8` a machine with eight GPUs, `2*h100:8`
    two machines, `cpu:8` eight virtual devices of this machine.

    Raises:
        ConfigError: if the name is invalid, or the compiler for it is not installed.
    """
    from jtrain.parallel.strategies.auto import device_memory

    parsed = TopologyName.parse(name)
    if parsed.kind == "cpu":
        return _cpu(name, parsed)
    if parsed.kind in GPU_TARGETS:
        return _gpu(name, parsed)
    if parsed.kind not in SLICES:
        kinds = ["cpu", *SLICES, *GPU_TARGETS]
        suggestion = did_you_mean(parsed.kind, kinds)
        raise ConfigError(
            f"--topology {name}: there is no compiler for {parsed.kind!r} here; kinds: "
            f"{', '.join(kinds)}{suggestion or '.'}"
        )
    if len(parsed.dims) > 2 and parsed.kind in _FLAT_KINDS:  # libtpu accepts v5e:4x4x4
        raise _no_slice(name, parsed)
    devices = _tpu(name, parsed)
    return Topology(name, devices, device_memory(devices), f"libtpu {installed_version('libtpu')}")


def prepare_environment(name: str) -> None:
    """Make JAX compute on the CPU, with as many devices as the topology asks for.

    Call it before importing JAX. Environment variables that are set already stay.
    """
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    kind, _, count = name.partition(":")
    if kind == "cpu" and count.isdecimal() and not sets_cpu_devices(os.environ):
        os.environ[NUMBER] = count


def nearest_slices(kind: str, dims: Sequence[int], count: int = 3) -> list[str]:
    """Return the shapes of valid slices of a kind that are nearest to these dims, nearest first."""

    def distance(shape: str) -> tuple[float, int]:
        sizes = [int(size) for size in shape.split("x")]
        unlike = sum(size not in dims for size in sizes) + abs(len(sizes) - len(dims))
        return abs(math.log(math.prod(sizes) / math.prod(dims))), unlike

    return sorted(SLICES[kind], key=distance)[:count]


def _cpu(name: str, parsed: TopologyName) -> Topology:
    import jax

    if parsed.count > 1 or len(parsed.dims) > 1:
        raise ConfigError(f"--topology {name}: a CPU has one number of devices; write cpu:8.")
    if len(jax.devices("cpu")) < parsed.chips:
        raise ConfigError(
            f"--topology {name}: this process has {len(jax.devices('cpu'))} CPU devices. Set "
            f"XLA_FLAGS=--xla_force_host_platform_device_count={parsed.shape}."
        )
    devices = jax.devices("cpu")[: parsed.chips]
    return Topology(name, devices, 0, f"jaxlib {installed_version('jaxlib')}")


def _gpu(name: str, parsed: TopologyName) -> Topology:
    from jax.experimental import topologies

    if len(parsed.dims) > 1 or parsed.chips not in MACHINE_GPUS:
        nearest = min(MACHINE_GPUS, key=lambda n: abs(math.log(n / parsed.chips)))
        count = max(parsed.count, math.ceil(parsed.count * parsed.chips / 8))
        many = f", or {count}*{parsed.kind}:8 for {count} machines" if count > 1 else ""
        raise ConfigError(
            f"--topology {name}: a machine has 1, 2, 4 or 8 GPUs; write "
            f"{parsed.kind}:{nearest}{many}."
        )
    plugin = _cuda_plugin()
    if not plugin:
        raise ConfigError(
            f"--topology {name}: the compiler for NVIDIA GPUs is not installed: "
            f"pip install 'jtrain[plan-gpu]' (no GPU and no CUDA needed)"
        )
    target = GPU_TARGETS[parsed.kind]
    try:
        with suppress_stderr():  # the plugin complains about the missing GPU
            description = topologies.get_topology_desc(
                platform="cuda",
                target_config=target.text(),
                topology=f"1x{parsed.count}x{parsed.chips}",
            )
    except Exception as error:  # the plugin raises several types
        raise ConfigError(
            f"--topology {name}: {plugin} cannot compile for it ({_first_line(error)}). "
            f"The compiler and jax are of one release: pip install --upgrade 'jtrain[plan-gpu]'"
        ) from error
    share = float(os.environ.get("XLA_PYTHON_CLIENT_MEM_FRACTION", FRACTION))
    return Topology(name, description.devices, int(share * target.memory), plugin)


def _cuda_plugin() -> str:
    """Return the installed package with the CUDA compiler and its version; empty if none is."""
    for version in ("13", "12"):
        if importlib.util.find_spec("jax_plugins") and importlib.util.find_spec(
            f"jax_plugins.xla_cuda{version}"
        ):
            package = f"jax-cuda{version}-pjrt"
            return f"{package} {installed_version(package)}"
    return ""


def _tpu(name: str, parsed: TopologyName) -> Sequence[Any]:
    # libtpu reads both on loading: no query of the machine type, several processes at once.
    os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")
    os.environ.setdefault("ALLOW_MULTIPLE_LIBTPU_LOAD", "1")
    from jax.experimental import topologies

    _check_libtpu(name)
    options = {"num_slices": parsed.count} if parsed.count > 1 else {}
    try:
        with suppress_stderr():  # libtpu complains about the missing TPU
            description = topologies.get_topology_desc(
                platform="tpu", topology_name=f"{parsed.kind}:{parsed.shape}", **options
            )
    except Exception as error:  # libtpu raises several types
        if parsed.shape in SLICES[parsed.kind]:
            raise ConfigError(
                f"--topology {name}: libtpu {installed_version('libtpu')} cannot compile for it "
                f"({_first_line(error)}). It may be older than jax {installed_version('jax')}: "
                f"pip install --upgrade 'jtrain[plan]'"
            ) from error
        raise _no_slice(name, parsed) from error
    return description.devices


def _no_slice(name: str, parsed: TopologyName) -> ConfigError:
    """Return the error for a slice that does not exist, with those nearest to it."""
    count = f"{parsed.count}*" if parsed.count > 1 else ""
    near = [f"{count}{parsed.kind}:{s}" for s in nearest_slices(parsed.kind, parsed.dims)]
    return ConfigError(
        f"--topology {name}: {parsed.kind} has no slice {parsed.shape}; the nearest are "
        f"{', '.join(near)}."
    )


def _check_libtpu(name: str) -> None:
    """Raise unless libtpu is installed and new enough."""
    if importlib.util.find_spec("libtpu") is None:
        raise ConfigError(
            f"--topology {name}: the TPU compiler is not installed: pip install 'jtrain[plan]'"
        )
    version = installed_version("libtpu")
    numbers = tuple(int(part) for part in re.findall(r"\d+", version)[:3])
    if numbers and numbers < OLDEST_LIBTPU:
        oldest = ".".join(map(str, OLDEST_LIBTPU))
        raise ConfigError(
            f"--topology {name}: libtpu {version} is out of date; plans need {oldest} or newer: "
            f"pip install --upgrade 'jtrain[plan]'"
        )


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0][:200]
