"""Checkpoint seals: the size and digest of each file of a complete checkpoint.

`seal.json` is written last and flushed after all files that it names, so a directory with a valid
seal was written to its end and has not changed since. A digest detects damage, not malice: whoever
can write the files can write a seal too.

Of several processes each seals the folder that it wrote, and the first one all else, with those
seals as files: nobody reads what another process wrote.
"""

import io
import json
import os
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any, cast

from jtrain.checkpoint.ownership import RunIdentity
from jtrain.errors import CheckpointError
from jtrain.io.disk_errors import patiently
from jtrain.io.regular_files import (
    FACTS,
    JSON_BYTES,
    check_regular,
    open_regular,
    parse_json,
    read_bytes,
)

SEAL, FORMAT, DIGEST = "seal.json", 2, "xxh3-128"
_LOCK = ".__lock"  # TensorStore removes its locks shortly after it reports the end
_BLOCK = 1 << 20  # bytes to read at a time


def seal(directory: Path, step: int, run: str = "") -> None:
    """Flush every file and folder to the disk, and record the size and digest of each file.

    A folder that is sealed already counts as one file, its seal.

    Args:
        directory: the checkpoint, or a folder in it that one process wrote.
        step: the step of its state.
        run: the id of the run that saves it; empty for none.

    Raises:
        OSError: of the file system.
    """
    files = {}
    for name, path in _files(directory):
        if path.name != SEAL:  # else it is flushed, with its folder
            sync(path)
        files[name] = [path.stat().st_size, digest(path)]
    for folder, names in sorted(_walk(directory)):
        if folder != str(directory) and names != [SEAL]:
            sync(Path(folder))
    owner = {"run": run} if run else {}
    content = {"format": FORMAT, "digest": DIGEST, "step": step, **owner, "files": files}
    (directory / SEAL).write_text(_to_text(content), encoding="utf-8")
    sync(directory / SEAL)
    sync(directory)


def seal_faults(
    directory: Path,
    step: int,
    *,
    full: bool,
    owner: RunIdentity | None = None,
    share: tuple[int, int] = (0, 1),
) -> list[str]:
    """Return how a checkpoint differs from its seal, each fault with its file.

    Args:
        step: the expected step.
        full: read every byte; otherwise compare only names and sizes, and not in folders that have
            a seal of their own.
        owner: the run that the checkpoint must belong to; None for any.
        share: a process and their number, which divide the sealed folders; the first process also
            reads the files beside them.

    Raises:
        CheckpointError: if its format is unknown, which is not damage.
    """
    try:
        content = _read(directory)
    except _BrokenError as error:
        return [str(error)]
    files, (process, processes) = content["files"], share
    result = [f"{SEAL}: is of step {content['step']}"] if content["step"] != step else []
    if owner and (fault := owner.fault(content.get("run", ""), step)):
        result.append(f"{SEAL}: {fault}")
    nested = [name for name in files if name.endswith(f"/{SEAL}")]
    if process == 0:
        result += compare_files(directory, files, full=full, except_bytes=nested)
    for i, name in enumerate(sorted(nested, key=lambda name: (len(name), name)), start=1):
        if not full or i % processes != process:
            continue
        if not (found := compare_files(directory, files, full=True, only=name)):
            found = seal_faults((directory / name).parent, step, full=True)
            found = [f"{name.removesuffix(SEAL)}{fault}" for fault in found]
        result += found
    return list(dict.fromkeys(result))


def sealed_run(directory: Path) -> str | None:
    """Return the id of the run that sealed a checkpoint, empty for no run; None if unknown."""
    return content.get("run", "") if (content := _read_valid(directory)) else None


def sealed_digest(directory: Path) -> str:
    """Return the digest of a checkpoint's seal, which has those of its files; empty if unknown."""
    return _digest_of(content) if (content := _read_valid(directory)) else ""


def sealed_step(directory: Path) -> int | None:
    """Return the sealed step of a checkpoint; None if there is no valid seal."""
    return content["step"] if (content := _read_valid(directory)) else None


def _read_valid(directory: Path) -> dict[str, Any] | None:
    try:
        return _read(directory)
    except (_BrokenError, CheckpointError):
        return None


def file_fault(directory: Path, step: int, name: str) -> str:
    """Return the fault of one file of a step; empty if there is none."""
    try:
        content = _read(directory)
    except _BrokenError as error:
        return str(error)
    if content["step"] != step:
        return f"{SEAL}: is of step {content['step']}"
    wrong = compare_files(directory, content["files"], full=True, only=name)
    return wrong[0] if wrong else ""


@patiently
def compare_files(
    directory: Path,
    files: Mapping[str, Any],
    *,
    full: bool,
    only: str = "",
    except_bytes: Collection[str] = (),
) -> list[str]:
    """Compare a directory with `files`: the size of each in bytes, and its digest.

    Args:
        full: compare the digests too, but of `except_bytes`.
        only: one file; empty: all, and no other may exist.
    """
    existing = {only: directory / only} if only else dict(_files(directory))
    if only and not os.path.lexists(existing[only]):
        existing = {}
    faults = []
    for name in [only] if only else sorted(files.keys() | existing.keys()):
        path = directory / name
        if name not in existing:
            faults.append(f"{name}: is missing")
        elif name not in files:
            faults.append(f"{name}: did not exist when the checkpoint was sealed")
        elif path.is_symlink():
            faults.append(f"{name}: is a link, and was a file")
        elif wrong := _irregular(path):
            faults.append(f"{name}: {wrong}")
        elif (size := path.stat().st_size) != files[name][0]:
            faults.append(f"{name}: is {size} bytes long, and was {files[name][0]}")
        elif (
            full
            and name not in except_bytes
            and (now := _try_digest(path, directory.parent)) != files[name][1]
        ):
            faults.append(f"{name}: its digest is {now}, and was {files[name][1]}")
    return faults


def list_files(directory: Path) -> list[str]:
    """Return the paths of all files in a directory but its seal, sorted."""
    return [name for name, _ in _files(directory, nested=True)]


def digest(path: Path, inside: Path | None = None) -> str:
    """Return the hexadecimal digest of a file, at 3.5 GB/s where SHA-256 has 1 (200 MB, one core).

    Below the directory `inside`, if one is given, no link is followed.
    """
    import xxhash

    hasher, block = xxhash.xxh3_128(), memoryview(bytearray(_BLOCK))
    with open_regular(path, buffering=0, inside=inside) as file:
        while count := cast(io.RawIOBase, file).readinto(block):
            hasher.update(block[:count])
    return hasher.hexdigest()


def sync(path: Path) -> None:
    """Flush a file, or the names in a folder, to the disk."""
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


class _BrokenError(Exception):
    """Fault of a seal itself."""


@patiently
def _read(directory: Path) -> dict[str, Any]:
    try:
        text = read_bytes(directory / SEAL, most=JSON_BYTES, inside=directory.parent).decode()
        content = parse_json(text)
        recorded, now = content.pop("seal"), _digest_of(content)
        known = content["format"] <= FORMAT and content["digest"] == DIGEST
    except FACTS as error:
        raise _BrokenError(f"{SEAL}: cannot be read ({error.strerror})") from None
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise _BrokenError(f"{SEAL}: cannot be read ({type(error).__name__}: {error})") from None
    if recorded != now:
        raise _BrokenError(f"{SEAL}: its own digest is {now}, and was {recorded}")
    if text != _to_text(content):
        raise _BrokenError(f"{SEAL}: is not formatted as jtrain writes it")
    if not known:
        raise CheckpointError(
            f"{directory} is a checkpoint of format {content['format']} with {content['digest']}, "
            f"and this jtrain reads up to {FORMAT} with {DIGEST}. Use the jtrain that wrote it, "
            f"or a newer one: pip install -U jtrain."
        )
    _check_structure(content)
    return content


def _check_structure(content: Mapping[str, Any]) -> None:
    """Raise unless each entry of a seal has its type: anybody can compute a digest."""
    files = content.get("files")
    entries = files if isinstance(files, dict) else {"": None}
    run = content.get("run", "")
    if (
        type(content.get("step")) is int
        and isinstance(run, str)
        and all(map(_is_size_and_digest, entries.values()))
        and not any({"", ".", ".."} & {*name.split("/")} for name in entries)
    ):
        return
    raise _BrokenError(f"{SEAL}: has no step, or no table of files with a size and a digest each")


def _is_size_and_digest(entry: Any) -> bool:
    return (
        isinstance(entry, list)
        and len(entry) == 2
        and type(entry[0]) is int
        and isinstance(entry[1], str)
    )


def _files(directory: Path, *, nested: bool = False) -> Iterator[tuple[str, Path]]:
    """Yield each file but the seal, with its relative path; a folder that cannot be read raises.

    Args:
        nested: those in folders with a seal of their own too.
    """
    paths = [Path(folder, name) for folder, names in _walk(directory, nested) for name in names]
    for path in sorted(paths):
        name = path.relative_to(directory).as_posix()
        if name != SEAL and not name.endswith(_LOCK):
            yield name, path


def _walk(directory: Path, nested: bool = False) -> Iterator[tuple[str, list[str]]]:
    """Yield each folder and the names of its files and links; of one with a seal, that alone."""
    for folder, folders, files in os.walk(directory, onerror=_raise):
        links = [name for name in folders if os.path.islink(os.path.join(folder, name))]
        if SEAL in files and not nested and folder != str(directory):
            folders.clear()
            yield folder, [SEAL]
        else:
            yield folder, [*files, *links]


def _raise(error: OSError) -> None:
    raise error


def _try_digest(path: Path, inside: Path) -> str:
    try:
        return digest(path, inside)
    except FACTS as error:
        return f"unreadable ({error.strerror})"


def _irregular(path: Path) -> str:
    try:
        check_regular(path)
    except FACTS as error:
        return error.strerror or "cannot be read"
    return ""


def _to_text(content: Mapping[str, Any]) -> str:
    return json.dumps({**content, "seal": _digest_of(content)}, indent=1) + "\n"


def _digest_of(content: Mapping[str, Any]) -> str:
    import xxhash

    return xxhash.xxh3_128(json.dumps(content, sort_keys=True).encode()).hexdigest()
