"""The machine cut into shares, one for each run that goes on at a time."""

import contextlib
import dataclasses
import importlib.util
import os
import subprocess
from collections.abc import Iterator, Mapping, Sequence

from jtrain.errors import ConfigError


@dataclasses.dataclass(frozen=True)
class MachineShare:
    """Cores, and GPUs where there are some, that no other share has."""

    cores: frozenset[int]
    """Empty where the system pins no process to cores."""
    gpus: Sequence[str] = ()

    def environment(self) -> Mapping[str, str]:
        """What a process is to be told; the flags of XLA stay as they are."""
        return {"CUDA_VISIBLE_DEVICES": ",".join(self.gpus)} if self.gpus else {}

    @contextlib.contextmanager
    def held(self) -> Iterator[None]:
        """Within, this thread runs on these cores, and so does what it starts for good."""
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


def shares(jobs: int) -> list[MachineShare]:
    """The machine cut into `jobs` shares, of the cores and GPUs that this process may use.

    Raises:
        ConfigError: if there are fewer cores or GPUs than jobs.
    """
    if jobs < 1:
        raise ConfigError(f"--jobs {jobs}: at least one run goes on at a time; write --jobs 1")
    cores, gpus = _cores(), _gpus()
    for what, there in (("cores", cores), ("GPUs", gpus)):
        if there and len(there) < jobs:
            raise ConfigError(
                f"--jobs {jobs}, and there are {len(there)} {what} to share out: no two runs have "
                f"the same. Write --jobs {len(there)}."
            )
    return [
        MachineShare(frozenset(_part(cores, i, jobs)), tuple(_part(gpus, i, jobs)))
        for i in range(jobs)
    ]


def _part(things: Sequence, index: int, count: int) -> Sequence:
    """The index-th of `count` neighbouring parts."""
    return things[index * len(things) // count : (index + 1) * len(things) // count]


def _cores() -> list[int]:
    if not hasattr(os, "sched_getaffinity"):  # macOS
        return []
    return sorted(os.sched_getaffinity(0))


def _gpus() -> list[str]:
    """Those that JAX would take; asked of the driver, for JAX would keep their memory."""
    if os.environ.get("JAX_PLATFORMS", "").split(",")[0] == "cpu":
        return []
    plugins = ("jax_cuda12_plugin", "jax_cuda13_plugin")
    if not any(importlib.util.find_spec(name) for name in plugins):
        return []
    if "CUDA_VISIBLE_DEVICES" in os.environ:
        return [gpu for gpu in os.environ["CUDA_VISIBLE_DEVICES"].split(",") if gpu.strip()]
    command = ["nvidia-smi", "--query-gpu=index", "--format=csv,noheader"]
    try:
        got = subprocess.run(command, capture_output=True, text=True, timeout=20, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return []
    return got.stdout.split() if got.returncode == 0 else []
