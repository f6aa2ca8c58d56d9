"""Check of the compile cache: its owner, its size, its entries and its lock."""

import contextlib
import os
import tempfile
import time
import zlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

from jtrain.inspect.doctor.file_lock import lock_holder
from jtrain.inspect.doctor.finding import Finding, ok, warning
from jtrain.io.formatting import format_bytes
from jtrain.train.compilation_cache import find_trust_problem, usual_directory

LARGE = 20_000_000_000  # bytes
SECONDS = 0.5  # of reading entries, the newest first
SUFFIX, LOCK = "-cache", ".lockfile"
ZSTD = b"\x28\xb5\x2f\xfd"


class CacheFacts(NamedTuple):
    """The compile cache."""

    directory: Path | None
    """None for an object store."""
    exists: bool = False
    writable: bool = True
    """Whether the directory can be written, or created."""
    trust: str = ""
    """Why its programs must not be run; empty if they may."""
    entries: int = 0
    num_bytes: int = 0
    damaged: tuple[str, ...] = ()
    """Entries that cannot be unpacked."""
    locked_by: int = 0
    """Process that holds the lock of the cache; 0: none, -1: an unknown one."""


def gather_cache(environ: Mapping[str, str]) -> CacheFacts:
    """Look at the compile cache; nothing is created."""
    named = environ.get("JAX_COMPILATION_CACHE_DIR", "")
    if "://" in named:
        return CacheFacts(None)
    directory = Path(named) if named else usual_directory()
    if not directory.is_dir():
        existing = next(p for p in directory.absolute().parents if p.exists())
        return CacheFacts(directory, writable=_is_writable(existing))
    entries = []
    for entry in os.scandir(directory):
        with contextlib.suppress(FileNotFoundError):  # removed since it was listed
            if entry.name.endswith(SUFFIX):
                entries.append((entry.stat().st_mtime, entry.stat().st_size, entry.path))
    return CacheFacts(
        directory,
        exists=True,
        writable=_is_writable(directory),
        trust="" if named else find_trust_problem(directory),
        entries=len(entries),
        num_bytes=sum(size for _, size, _ in entries),
        damaged=tuple(_damaged(sorted(entries, reverse=True))),
        locked_by=lock_holder(directory / LOCK),
    )


def check_cache(facts: CacheFacts) -> Iterator[Finding]:
    """Return findings about the compile cache."""
    if facts.directory is None:
        yield ok("cache", "compiled programs are kept in an object store")
        return
    faults = [*_check_directory(facts), *_check_entries(facts)]
    yield from faults
    if not faults:
        content = f"{facts.entries} programs, {format_bytes(facts.num_bytes)}"
        yield ok("cache", f"{facts.directory}: {content if facts.exists else 'not used yet'}")


def _check_directory(facts: CacheFacts) -> Iterator[Finding]:
    if not facts.writable:
        yield warning(
            "cache",
            "cache-unwritable",
            f"{facts.directory} cannot be written: each run compiles anew",
            "export JAX_COMPILATION_CACHE_DIR=$(mktemp -d)",
        )
    elif facts.trust:
        yield warning(
            "cache",
            "cache-untrusted",
            f"{facts.trust}: another user may have put programs there, and none of them is run",
            f"mv {facts.directory} {facts.directory}.old",
        )
    if facts.locked_by:
        who = f"process {facts.locked_by}" if facts.locked_by > 0 else "a process"
        yield warning(
            "cache",
            "cache-locked",
            f"{facts.directory}/{LOCK} is locked by {who}: each program waits 10 s for it",
            f"kill {facts.locked_by}" if facts.locked_by > 0 else f"rm {facts.directory}/{LOCK}",
        )


def _check_entries(facts: CacheFacts) -> Iterator[Finding]:
    for first in facts.damaged[:1]:
        more = f" and {len(facts.damaged) - 1} more" if len(facts.damaged) > 1 else ""
        yield warning(
            "cache",
            "cache-damaged",
            f"{first}{more} cannot be unpacked: JAX compiles these programs anew in "
            f"each run, and never replaces the entries",
            "rm " + " ".join(facts.damaged[:20]),
        )
    if facts.num_bytes > LARGE:
        yield warning(
            "cache",
            "cache-large",
            f"{facts.directory} has {format_bytes(facts.num_bytes)} in {facts.entries} programs, "
            f"and nothing removes old ones",
            f"find {facts.directory} -name '*{SUFFIX}' -mtime +30 -delete",
        )


def _is_writable(directory: Path) -> bool:
    """Return whether files can be created, also for root, whom access(2) refuses nothing."""
    try:
        tempfile.TemporaryFile(dir=directory).close()
    except OSError:
        return False
    return True


def _damaged(entries: list[tuple[float, int, str]]) -> Iterator[str]:
    """Yield the entries that cannot be unpacked, as far as the time allows."""
    end = time.monotonic() + SECONDS
    for _, _, path in entries:
        if time.monotonic() > end:
            return
        try:
            data = Path(path).read_bytes()
        except OSError:
            continue
        if not _is_packed(data):
            yield path


def _is_packed(data: bytes) -> bool:
    """Return whether the packed program is complete; zlib or zstd, as JAX packs it."""
    if data.startswith(ZSTD):
        try:
            import zstandard  # pyright: ignore[reportMissingImports]
        except ImportError:
            return True  # the installed JAX cannot read it either, and packs anew
        try:
            zstandard.ZstdDecompressor().decompress(data)
        except zstandard.ZstdError:
            return False
        return True
    unpacker = zlib.decompressobj()
    try:
        unpacker.decompress(data)
    except zlib.error:
        return False
    return unpacker.eof
