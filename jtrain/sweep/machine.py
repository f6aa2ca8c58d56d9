"""Shares of the machine, one for each concurrent run."""

import contextlib
import dataclasses
import importlib.util
import os
import subprocess
from collections.abc import Iterator, Mapping, Sequence

from jtrain.errors import ConfigError


@dataclasses.dataclass(frozen=True)
class MachineShare:
    """Cores, and GPUs if there are any, that belong to no other share."""

    cores: frozenset[int]
    """Empty where the system cannot pin a process to cores."""
    gpus: Sequence[str] = ()

    def environment(self) -> Mapping[str, str]:
        """Return the environment of a process of this share; XLA's flags are unchanged."""
        return {"CUDA_VISIBLE_DEVICES": ",".join(self.gpus)} if self.gpus else {}

    @contextlib.contextmanager
    def pinned(self) -> Iterator[None]:
        """Pin this thread to the share's cores in a `with` block; its children stay pinned."""
        if not self.cores:
            yield
            return
        before = os.sched_getaffinity(0)
        os.sched_setaffinity(0, self.cores)
        try:
            yield
        finally:
            os.sched_setaffinity(0, before)

    def __str__(self) -> str:
        cores = ",".join(map(str, sorted(self.cores)))
        return f"cores {cores}" + (f", GPUs {','.join(self.gpus)}" if self.gpus else "")


def split_machine(jobs: int) -> list[MachineShare]:
    """Split the cores and GPUs that this process may use into `jobs` shares.

    Raises:
        ConfigError: if there are fewer cores or GPUs than jobs.
    """
    if jobs < 1:
        raise ConfigError(f"--jobs {jobs}: at least one run at a time is needed; write --jobs 1")
    cores, gpus = _cores(), _gpus()
    for kind, available in (("cores", cores), ("GPUs", gpus)):
        if available and len(available) < jobs:
            raise ConfigError(
                f"--jobs {jobs}, and there are only {len(available)} {kind}: runs do not share "
                f"them. Write --jobs {len(available)}."
            )
    return [
        MachineShare(frozenset(_part(cores, i, jobs)), tuple(_part(gpus, i, jobs)))
        for i in range(jobs)
    ]


def _part(items: Sequence, index: int, count: int) -> Sequence:
    """Return the index-th of `count` contiguous parts."""
    return items[index * len(items) // count : (index + 1) * len(items) // count]


def _cores() -> list[int]:
    if not hasattr(os, "sched_getaffinity"):  # macOS
        return []
    return sorted(os.sched_getaffinity(0))


def _gpus() -> list[str]:
    """Return the GPUs that JAX would use, by the driver: JAX would reserve their memory."""
    if os.environ.get("JAX_PLATFORMS", "").split(",")[0] == "cpu":
        return []
    plugins = ("jax_cuda12_plugin", "jax_cuda13_plugin")
    if not any(importlib.util.find_spec(name) for name in plugins):
        return []
    if "CUDA_VISIBLE_DEVICES" in os.environ:
        return [gpu for gpu in os.environ["CUDA_VISIBLE_DEVICES"].split(",") if gpu.strip()]
    command = ["nvidia-smi", "--query-gpu=index", "--format=csv,noheader"]
    try:
        result = subprocess.run(command, capture_output=True, text=True, timeout=20, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return []
    return result.stdout.split() if result.returncode == 0 else []
