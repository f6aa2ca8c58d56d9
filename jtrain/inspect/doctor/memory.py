"""Check of memory, and of the limits of processes."""

import dataclasses
import os
import re
import resource
from collections.abc import Iterator
from pathlib import Path

from jtrain.inspect.doctor.finding import Finding, error, ok, warning
from jtrain.io.formatting import format_bytes

# JAX with a small model takes 0.5 GB (docs/doctor.md); below, a run is killed while it starts.
LEAST, LITTLE = 600_000_000, 2_000_000_000
ADDRESSES = 16_000_000_000  # bytes of address space; JAX maps more than it uses
FILES = 1024
SHARED = 100_000_000  # bytes of /dev/shm; Docker's default is 64 MB
UNLIMITED = resource.RLIM_INFINITY


@dataclasses.dataclass(frozen=True, kw_only=True)
class MemoryFacts:
    """Memory and limits of this process, in bytes."""

    total: int = 0
    available: int = 0
    limit: int = 0
    """Limit of the container or the job (cgroup); 0: none."""
    limit_file: str = ""
    used: int = 0
    """Memory that counts towards the limit, without the page cache."""
    addresses: tuple[int, int] = (UNLIMITED, UNLIMITED)
    """Soft and hard limit of the address space (ulimit -v); negative: none."""
    files: tuple[int, int] = (FILES, FILES)
    """Soft and hard limit of open files (ulimit -n)."""
    file_bytes: tuple[int, int] = (UNLIMITED, UNLIMITED)
    """Soft and hard limit of the size of a file (ulimit -f)."""
    shared: int | None = None
    """Size of /dev/shm on a machine with several GPUs; None otherwise."""

    @property
    def free(self) -> int:
        """Bytes that this process may take."""
        left = self.limit - self.used if self.limit else self.available
        return max(min(left, self.available or left), 0)


def gather_memory(root: Path = Path("/")) -> MemoryFacts:
    """Read the memory of the machine and the limits of this process."""
    info = dict(re.findall(r"(\w+):\s+(\d+) kB", _read(root / "proc/meminfo")))
    limit, file, used = _cgroup(root)
    return MemoryFacts(
        total=int(info.get("MemTotal", 0)) * 1024,
        available=int(info.get("MemAvailable", 0)) * 1024,
        limit=limit,
        limit_file=file,
        used=used,
        addresses=resource.getrlimit(resource.RLIMIT_AS),
        files=resource.getrlimit(resource.RLIMIT_NOFILE),
        file_bytes=resource.getrlimit(resource.RLIMIT_FSIZE),
        shared=_size(root / "dev/shm") if (root / "dev/nvidia1").exists() else None,
    )


def check_memory(facts: MemoryFacts) -> Iterator[Finding]:
    """Return findings about memory and limits."""
    faults = [*_check_free(facts), *_check_limits(facts)]
    yield from faults
    if not faults:
        limit = f"; limit of the job {format_bytes(facts.limit)}" if facts.limit else ""
        yield ok(
            "memory",
            f"{format_bytes(facts.free)} of {format_bytes(facts.total)} are free{limit}",
        )


def _check_free(facts: MemoryFacts) -> Iterator[Finding]:
    if not facts.total or facts.free >= LITTLE:
        return
    make = error if facts.free < LEAST else warning
    if facts.limit and facts.limit - facts.used <= facts.available:
        yield make(
            "memory",
            "memory-limit",
            f"{format_bytes(facts.free)} are left of the job's limit of "
            f"{format_bytes(facts.limit)} ({facts.limit_file}); JAX with a small model takes 0.5 "
            f"GB, and the kernel kills what takes more",
            "request more: srun --mem=8G, docker run --memory 8g, resources.limits.memory: 8Gi",
        )
    else:
        yield make(
            "memory",
            "memory-little",
            f"{format_bytes(facts.free)} of {format_bytes(facts.total)} are free; JAX with a small "
            f"model takes 0.5 GB",
            "ps aux --sort=-rss | head",
        )


def _check_limits(facts: MemoryFacts) -> Iterator[Finding]:
    if 0 <= facts.addresses[0] < ADDRESSES:
        yield warning(
            "memory",
            "limit-addresses",
            f"the address space is limited to {format_bytes(facts.addresses[0])}, and JAX maps "
            f"more than it uses: compilations may fail",
            _raise_limit("-v", facts.addresses[1]),
        )
    if facts.file_bytes[0] >= 0:
        yield error(
            "memory",
            "limit-file-size",
            f"files may not grow beyond {format_bytes(facts.file_bytes[0])}: a larger checkpoint "
            f"fails",
            _raise_limit("-f", facts.file_bytes[1]),
        )
    if 0 <= facts.files[0] < FILES:
        yield warning(
            "memory",
            "limit-files",
            f"only {facts.files[0]} files may be open at a time; readers of data and checkpoints "
            f"need more",
            _raise_limit("-n", facts.files[1], FILES),
        )
    if facts.shared is not None and facts.shared < SHARED:
        yield warning(
            "memory",
            "shared-memory",
            # https://docs.nvidia.com/deeplearning/nccl/user-guide/docs/troubleshooting.html
            f"/dev/shm has {format_bytes(facts.shared)}, and NCCL exchanges data between "
            f"GPUs there: it fails with an unhandled system error",
            "docker run --shm-size=2g ..., or mount -o remount,size=2G /dev/shm",
        )


def _raise_limit(option: str, hard: int, least: int = 0) -> str:
    value = "unlimited" if hard < 0 and not least else least or ""
    if hard >= 0 and not (least and hard >= least):
        return f"ask the administrator to raise the hard limit, which ulimit -H {option} shows"
    return f"ulimit {option} {value}"


def _cgroup(root: Path) -> tuple[int, str, int]:
    """Return the smallest memory limit of this process's control groups, its file and the use."""
    found = []
    for line in _read(root / "proc/self/cgroup").splitlines():
        _, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if controllers and "memory" not in controllers.split(","):
            continue
        mount = root / "sys/fs/cgroup" / ("memory" if controllers else "")
        group = mount / path.strip("/")
        names = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
        if not controllers:
            names = ("memory.max", "memory.current", "inactive_file")
        for folder in (group, *group.parents):
            # Inside a container the path is the host's, and the limits are at the mount.
            if not folder.is_relative_to(mount):
                break
            limit = _read(folder / names[0]).strip()
            if limit.isdigit() and int(limit) < 1 << 60:
                cache = re.search(rf"^{names[2]} (\d+)", _read(folder / "memory.stat"), re.M)
                used = int(_read(folder / names[1]).strip() or 0) - int(cache[1] if cache else 0)
                found.append((int(limit) - used, int(limit), str(folder / names[0]), used))
    if not found:
        return 0, "", 0
    _, limit, file, used = min(found)
    return limit, file, used


def _size(folder: Path) -> int | None:
    try:
        found = os.statvfs(folder)
    except OSError:
        return None
    return found.f_frsize * found.f_blocks


def _read(file: Path) -> str:
    try:
        return file.read_text()
    except (OSError, UnicodeDecodeError):
        return ""
