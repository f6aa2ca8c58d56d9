"""Absent devices, by a name such as `v5e:4x4`, `2*v5p:4x4x4`, `2*h100:8` or `cpu:8`."""

import contextlib
import dataclasses
import importlib.util
import math
import os
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from jtrain.distributed.cluster.cluster import NUMBER, sets_cpu_devices
from jtrain.distributed.manifests.machines import TPUS, TopologyName
from jtrain.errors import ConfigError
from jtrain.errors.spelling import did_you_mean
from jtrain.io.environment import installed_version

if TYPE_CHECKING:
    from jtrain.train.experiment import RunConfig

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
        machines = f"{parsed.kind}:8, or 2*{parsed.kind}:8 for 2 machines"
        raise ConfigError(f"--topology {name}: a machine has 1, 2, 4 or 8 GPUs; write {machines}.")
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

    if importlib.util.find_spec("libtpu") is None:
        raise ConfigError(
            f"--topology {name}: the TPU compiler is not installed: pip install 'jtrain[plan]'"
        )
    options = {"num_slices": parsed.count} if parsed.count > 1 else {}
    if parsed.kind in TPUS:
        options |= _links(parsed)
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


def _links(parsed: TopologyName) -> dict[str, Any]:
    """Return the chips of a host and the rings of a slice, which libtpu takes to be 2x2 and none.

    A chip of v4 is one device on a TPU VM, and two by libtpu's default.

    Sources: the pages of `jtrain.parallel.chips`, and the machine types of `TPUS`.
    """
    from jtrain.parallel.chips import CHIPS  # imports JAX, before which the environment is set

    chips = parsed.chips if parsed.chips in TPUS[parsed.kind].machine_types else 4
    rings = CHIPS[parsed.kind].has_wrap(parsed.dims)
    return {
        "chips_per_host_bounds": {1: (1, 1, 1), 4: (2, 2, 1), 8: (2, 4, 1)}[chips],
        "wrap": tuple(rings and axis < len(parsed.dims) for axis in range(3)),
    } | ({"chip_config_name": "megacore"} if parsed.kind == "v4" else {})


def _no_slice(name: str, parsed: TopologyName) -> ConfigError:
    slices = ", ".join(f"{parsed.kind}:{shape}" for shape in SLICES[parsed.kind])
    return ConfigError(
        f"--topology {name}: {parsed.kind} has no slice {parsed.shape}; there are {slices}."
    )


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0][:200]


class GpuTarget(NamedTuple):
    """Facts of a GPU that XLA compiles for."""

    name: str
    capability: int  # CUDA compute capability, major
    cores: int  # streaming multiprocessors
    fpus: int  # float32 units of a core
    memory: int  # bytes
    bandwidth: int  # bytes a second
    cache: int  # bytes of the L2 cache
    shared: int  # bytes of shared memory of a core
    clock: float  # GHz

    def text(self) -> str:
        """Return the description as XLA reads it, a GpuTargetConfigProto in text form."""
        accelerated = "ACCELERATED_FEATURES" if self.capability >= 9 else "NONE"
        return f"""
            gpu_device_info {{
              threads_per_block_limit: 1024
              threads_per_warp: 32
              shared_memory_per_block: 49152
              shared_memory_per_core: {self.shared}
              shared_memory_per_block_optin: {self.shared - 1024}
              threads_per_core_limit: 2048
              core_count: {self.cores}
              fpus_per_core: {self.fpus}
              block_dim_limit_x: 2147483647
              block_dim_limit_y: 65535
              block_dim_limit_z: 65535
              thread_dim_limit_x: 1024
              thread_dim_limit_y: 1024
              thread_dim_limit_z: 64
              registers_per_core_limit: 65536
              registers_per_block_limit: 65536
              memory_bandwidth: {self.bandwidth}
              device_memory_size: {self.memory}
              l2_cache_size: {self.cache}
              clock_rate_ghz: {self.clock}
              cuda_compute_capability {{
                major: {self.capability}
                feature_extension: {accelerated}
              }}
              driver_version: "13.0.0"
              runtime_version: "12.8.0"
              compile_time_toolkit_version: "12.8.0"
            }}
            platform_name: "CUDA"
            dnn_version_info {{ major: 9 minor: 10 patch: 0 }}
            device_description_str: "{self.name}"
        """


# Source: openxla/xla, xla/backends/gpu/target_config/specs (November 2026).
GPU_TARGETS: dict[str, GpuTarget] = {
    "a100": GpuTarget(
        *("NVIDIA A100-SXM4-80GB", 8, 108, 64, 85100068864),
        *(2039040000000, 41943040, 167936, 1.41),
    ),
    "h100": GpuTarget(
        *("NVIDIA H100 80GB HBM3", 9, 132, 128, 84942979072),
        *(3352320000000, 52428800, 233472, 1.98),
    ),
    "h200": GpuTarget(
        *("NVIDIA H200 141GB HBM3e", 9, 132, 128, 151397597184),
        *(4800000000000, 52428800, 233472, 1.98),
    ),
    "b200": GpuTarget(
        *("NVIDIA B200", 10, 148, 128, 191514411008),
        *(7672320000000, 132644864, 233472, 1.965),
    ),
}
"""GPUs, by the names in a topology such as `h100:8`."""

FRACTION = 0.75
"""Share of a GPU's memory that JAX takes, unless XLA_PYTHON_CLIENT_MEM_FRACTION is set.

Source: https://docs.jax.dev/en/latest/gpu_memory_allocation.html.
"""


@contextlib.contextmanager
def suppress_stderr() -> Iterator[None]:
    """Discard all output on standard error, including that of C++ libraries."""
    saved, null = os.dup(2), os.open(os.devnull, os.O_WRONLY)
    try:
        os.dup2(null, 2)
        yield
    finally:
        os.dup2(saved, 2)
        os.close(saved)
        os.close(null)


@dataclasses.dataclass(frozen=True)
class AbsentDevice:
    """A device by its place: as much of a JAX device as layouts look at."""

    id: int
    process_index: int
    slice_index: int
    platform: str
    device_kind: str = "absent"

    def addressable_memories(self) -> list:
        """Return no memories."""
        return []


def check_fills(
    config: "RunConfig", topology: str, *, platform: str, slices: int, hosts: int, devices: int
) -> None:
    """Raise unless a run uses all devices of a topology, with as many rows on each.

    A layout that is chosen at the start (parallel.kind=auto) fits any number of devices.

    Args:
        hosts: of each slice, with one process each.
        devices: of each host.

    Raises:
        ConfigError: with what to change.
    """
    from jtrain.parallel import Auto, check_divides

    if isinstance(config.parallel, Auto):
        return
    places = [(s, h) for s in range(slices) for h in range(hosts) for _ in range(devices)]
    absent = [AbsentDevice(i, s * hosts + h, s, platform) for i, (s, h) in enumerate(places)]
    try:
        strategy = config.parallel.build(absent)
        check_divides(config.batch, strategy.shares, config.microbatches)
        check_divides(
            config.evaluate.batch or config.batch, strategy.shares, 1, name="evaluate.batch"
        )
    except ConfigError as error:
        raise ConfigError(f"{topology} has {len(absent)} devices. {error}") from error
    used = math.prod(strategy.axes.values()) if strategy.axes else 1
    if used < len(absent):
        raise ConfigError(
            f"{topology} has {len(absent)} devices, and parallel.kind={config.parallel.kind} uses "
            f"{used} of them. Write parallel.kind=fsdp parallel.devices=0, which uses all."
        )
