"""Machines of a topology: hosts, chips a host, and the names that clusters have for them."""

import dataclasses
import itertools
import math
import re
from collections.abc import Mapping
from typing import NamedTuple

from jtrain.errors import ConfigError
from jtrain.errors.spelling import did_you_mean

_PATTERN = re.compile(r"(?:([1-9]\d*)\*)?([a-z]\w*):([1-9]\d*(?:x[1-9]\d*)*)")


@dataclasses.dataclass(frozen=True)
class TopologyName:
    """Parts of the name of a topology."""

    count: int
    """Slices of a TPU, or machines with GPUs."""
    kind: str
    dims: tuple[int, ...]
    """Chips of a slice in each direction, or the devices of a machine."""

    @classmethod
    def parse(cls, text: str) -> "TopologyName":
        """Parse `KIND:SHAPE` or `COUNT*KIND:SHAPE`.

        Raises:
            ConfigError: if the text is not a name of a topology.
        """
        found = _PATTERN.fullmatch(text)
        if found is None:
            raise ConfigError(
                f"--topology {text} is not a topology: write KIND:SHAPE, such as v5e:4x4, "
                f"2*v5e:4x4 for two slices, h100:8 for a machine of 8 GPUs, or cpu:8."
            )
        return cls(int(found[1] or 1), found[2], tuple(map(int, found[3].split("x"))))

    @property
    def shape(self) -> str:
        """The shape as it is written: `4x4`."""
        return "x".join(map(str, self.dims))

    @property
    def chips(self) -> int:
        """Chips of a slice, or devices of a machine."""
        return math.prod(self.dims)

    def __str__(self) -> str:
        count = f"{self.count}*" if self.count > 1 else ""
        return f"{count}{self.kind}:{self.shape}"


_FLAT = ("1x1", "2x2", "2x4", "4x4", "4x8", "8x8", "8x16", "16x16")
_SMALL_TORUS = ("2x2x1", "2x2x2", "2x2x4", "2x4x4")


class Tpu(NamedTuple):
    """A generation of TPUs, by the names of Google Cloud.

    Sources: https://cloud.google.com/kubernetes-engine/docs/concepts/plan-tpus (machine types,
    labels, topologies), https://cloud.google.com/tpu/docs/runtimes (runtime versions), both also in
    https://github.com/AI-Hypercomputer/xpk, src/xpk/core/system_characteristics.py, v1.13.1.
    """

    label: str
    """Value of the node label cloud.google.com/gke-tpu-accelerator."""
    machine_types: Mapping[int, str]
    """Machine type of GKE by the chips of a host."""
    vm: str
    """Prefix of the accelerator type of a TPU VM; empty: it is no TPU VM."""
    runtime: str = ""
    """Runtime version of a TPU VM."""
    cores: int = 1
    """Number in the accelerator type of a TPU VM for each chip."""
    devices: int = 1
    """Devices that JAX shows for each chip."""
    cubes: int = 0
    """Most cubes of 4x4x4 chips in a slice; 0: a flat generation, of at most 16x16."""

    def has_shape(self, topology: TopologyName) -> bool:
        """Return whether a slice of this shape exists."""
        if not self.cubes:
            return topology.shape in _FLAT
        if topology.shape in _SMALL_TORUS or (
            topology.shape == "1x1x1" and 1 in self.machine_types
        ):
            return True
        ordered = all(a <= b for a, b in itertools.pairwise(topology.dims)) or self.vm == "v4"
        whole = len(topology.dims) == 3 and all(dim % 4 == 0 for dim in topology.dims)
        return whole and ordered and topology.chips <= self.cubes * 64

    def describe_shapes(self) -> str:
        """Return the shapes of slices as a sentence lists them."""
        if not self.cubes:
            return ", ".join(_FLAT)
        return f"{', '.join(_SMALL_TORUS)}, and AxBxC of multiples of 4 with A <= B <= C"


TPUS: Mapping[str, Tpu] = {
    "v4": Tpu("tpu-v4-podslice", {4: "ct4p-hightpu-4t"}, "v4", "tpu-ubuntu2204-base", 2, cubes=64),
    "v5e": Tpu(
        "tpu-v5-lite-podslice",
        {1: "ct5lp-hightpu-1t", 4: "ct5lp-hightpu-4t", 8: "ct5lp-hightpu-8t"},
        "v5litepod",
        "v2-alpha-tpuv5-lite",
    ),
    "v5p": Tpu("tpu-v5p-slice", {4: "ct5p-hightpu-4t"}, "v5p", "v2-alpha-tpuv5", 2, cubes=140),
    "v6e": Tpu(
        "tpu-v6e-slice",
        {1: "ct6e-standard-1t", 4: "ct6e-standard-4t", 8: "ct6e-standard-8t"},
        "v6e",
        "v2-alpha-tpuv6e",
    ),
    # Ironwood is a machine of GKE and of Compute Engine, and no TPU VM.
    "tpu7x": Tpu(
        "tpu7x", {1: "tpu7x-standard-1t", 4: "tpu7x-standard-4t"}, "", devices=2, cubes=144
    ),
}


# SkyPilot's names of GPUs. The largest machine has 8 of them.
GPUS: Mapping[str, str] = {
    "t4": "T4",
    "v100": "V100",
    "l4": "L4",
    "l40s": "L40S",
    "a10g": "A10G",
    "a100": "A100",
    "a100_80gb": "A100-80GB",
    "h100": "H100",
    "h200": "H200",
    "b200": "B200",
    "gb200": "GB200",
}
LARGEST = {"gb200": 4}  # where it has fewer


class Machines(NamedTuple):
    """Hosts of a topology, each with one process."""

    topology: TopologyName
    groups: int
    """Slices of a TPU; 1 for GPUs, whose hosts are all alike."""
    hosts: int
    """Hosts of each group."""
    chips: int
    """Chips of each host."""
    tpu: Tpu | None = None
    gpu: str = ""
    """SkyPilot's name of the GPUs; empty for TPUs."""

    @property
    def processes(self) -> int:
        """Hosts of all groups."""
        return self.groups * self.hosts

    @property
    def devices(self) -> int:
        """Devices of each host, as JAX counts them."""
        return self.chips * (self.tpu.devices if self.tpu else 1)

    @property
    def machine_type(self) -> str:
        """Machine type of GKE's node pool, `ct5lp-hightpu-4t`; empty for GPUs."""
        return self.tpu.machine_types[self.chips] if self.tpu else ""

    @property
    def accelerator_type(self) -> str:
        """Name of the slice as a TPU VM, `v5litepod-16`; empty if it is none."""
        if self.tpu is None or not self.tpu.vm:
            return ""
        return f"{self.tpu.vm}-{self.topology.chips * self.tpu.cores}"

    def describe(self) -> str:
        """Return the hosts in words: `2 slices, each of 4 hosts of 4 chips`."""
        unit = "chip" if self.tpu else "GPU"
        hosts = f"{self.hosts} host{'s' * (self.hosts > 1)} of {self.chips} {unit}"
        text = f"{hosts}{'s' * (self.chips > 1)}"
        return f"{self.groups} slices, each of {text}" if self.groups > 1 else text


def find_machines(name: str) -> Machines:
    """Return the machines of a topology, such as `2*v6e:4x4` or `h100:8`.

    Raises:
        ConfigError: if there are no such machines, with those that there are.
    """
    topology = TopologyName.parse(name)
    if topology.kind in TPUS:
        return _slices(topology, TPUS[topology.kind])
    if topology.kind in GPUS:
        return _gpu_machines(topology)
    kinds = [*TPUS, *GPUS]
    raise ConfigError(
        f"--topology {name}: a cluster has no {topology.kind!r}; kinds: {', '.join(kinds)}"
        f"{did_you_mean(topology.kind, kinds) or '.'}"
    )


def _slices(topology: TopologyName, tpu: Tpu) -> Machines:
    if not tpu.has_shape(topology):
        odd = topology.chips > 4 and topology.chips % 4
        why = f": {topology.chips} chips are not whole hosts of 4" if odd else ""
        raise ConfigError(
            f"--topology {topology}: no slice of {topology.kind} has the shape {topology.shape}"
            f"{why}. Slices of {topology.kind} are {tpu.describe_shapes()}."
        )
    # A host of all chips where there is one (1, 4 or 8 chips), else hosts of 4.
    chips = topology.chips if topology.chips in tpu.machine_types else 4
    hosts = topology.chips // chips
    if topology.count > 1 and hosts == 1:
        larger = "2x2x2" if tpu.cubes else "4x4"
        raise ConfigError(
            f"--topology {topology}: slices of one host cannot be joined, only slices of several "
            f"(https://cloud.google.com/kubernetes-engine/docs/how-to/tpu-multislice). Write "
            f"larger slices, such as {topology.count}*{topology.kind}:{larger}."
        )
    return Machines(topology, topology.count, hosts, chips, tpu=tpu)


def _gpu_machines(topology: TopologyName) -> Machines:
    most = LARGEST.get(topology.kind, 8)
    counts = [count for count in (1, 2, 4, 8) if count <= most]
    count = topology.chips
    if len(topology.dims) > 1 or count not in counts:
        hosts = topology.count * count // most if count % most == 0 else 2
        example = f"{hosts}*{topology.kind}:{most}"
        raise ConfigError(
            f"--topology {topology}: a machine has {', '.join(map(str, counts[:-1]))} or "
            f"{counts[-1]} GPUs of this kind, found {topology.shape}. Write {topology.kind}:"
            f"{max((c for c in counts if c <= count), default=1)}, or {example} for {hosts} "
            f"machines."
        )
    return Machines(topology, 1, topology.count, count, gpu=GPUS[topology.kind])
