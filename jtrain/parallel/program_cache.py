"""Cache of compiled programs, for processes that JAX's own cache does not serve."""

import contextlib
import hashlib
import os
import stat
import tempfile
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.experimental.serialize_executable import deserialize_and_load, serialize  # noqa: TID251
from jax.sharding import Mesh, NamedSharding
from jax.stages import Compiled, Lowered

from jtrain.parallel.devices import Device

DIGEST = hashlib.sha256().digest_size  # bytes, before the program


def load_or_compile(lowered: Lowered, state: Any) -> Compiled:
    """Load or compile a program; with JAX's compile cache it is compiled once on a machine.

    JAX's cache serves all processes except CPU processes after the first: only the first writes,
    under a name made of its own devices, which no other process reads (jax 0.10 to 0.12). For the
    others each program is in a file beside JAX's.

    Args:
        state: arguments or results with shardings, in any tree.
    """
    devices = mesh_devices(state)
    file = _file(lowered, devices)
    if file is None:
        return lowered.compile()
    program = _load(file, lowered, devices)
    if program is None:
        program = lowered.compile()
        _write(program, file)
    return program


def mesh_devices(state: Any) -> Sequence[Device]:
    """Return the devices of the first leaf with a mesh, in its order; none without one."""
    for leaf in jax.tree.leaves(state):
        sharding = getattr(leaf, "sharding", None)
        if isinstance(sharding, NamedSharding) and isinstance(sharding.mesh, Mesh):
            return list(np.ravel(sharding.mesh.devices))
    return []


def _file(lowered: Lowered, devices: Sequence[Device]) -> Path | None:
    """Return this process's file of the program; None if JAX caches it, or caching is off."""
    settings: Any = jax.config  # the attributes are made when JAX starts
    directory = settings.jax_compilation_cache_dir
    on = bool(directory) and settings.jax_enable_compilation_cache
    if not (on and devices and devices[0].platform == "cpu" and jax.process_index() > 0):
        return None
    if "://" in directory:  # JAX keeps its programs in an object store, which has no owner and mode
        return None
    text = lowered.as_text()
    if "callback" in text:  # a callback has addresses of this process
        return None
    ids = [device.id for device in devices]
    place = f"process {jax.process_index()} of {jax.process_count()}, devices {ids}"
    flags = os.environ.get("XLA_FLAGS", "")
    versions = [metadata.version(package) for package in ("jax", "jaxlib")]
    key = "\n".join((text, place, *versions, flags, _instructions()))
    return Path(directory) / "processes" / hashlib.sha256(key.encode()).hexdigest()


def _instructions() -> str:
    """Return the processor's features on Linux: a program may use all of them."""
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith(("flags", "Features")):
                return line
    return ""


def _load(file: Path, lowered: Lowered, devices: Sequence[Device]) -> Compiled | None:
    """Return the program in `file`; None if it is missing, damaged, or another user's.

    The file holds machine code like JAX's own files beside it, with the same trust (JAX unpickles
    its files too): who can write the file can run any code. So only this user may write it, and a
    file that another user wrote or could have written is not read. SECURITY.md names this file.
    """
    try:
        if not (_is_private(file.parent) and _is_private(file)):
            return None
        content = file.read_bytes()
        digest, program = content[:DIGEST], content[DIGEST:]
        if hashlib.sha256(program).digest() != digest:
            return None
        in_tree = jax.tree.structure(lowered.args_info)
        return deserialize_and_load(program, in_tree, lowered.out_tree, execution_devices=devices)
    except (OSError, EOFError, ValueError, TypeError, jax.errors.JaxRuntimeError):
        return None


def _is_private(path: Path) -> bool:
    """Return whether only this user may write the path, and it is no link."""
    found = path.lstat()
    link, others = stat.S_ISLNK(found.st_mode), found.st_mode & (stat.S_IWGRP | stat.S_IWOTH)
    return found.st_uid == os.getuid() and not link and not others


def _write(program: Compiled, file: Path) -> None:
    """Write the program atomically; if writing fails, the next run compiles again."""
    try:
        content, _, _ = serialize(program)
    except (ValueError, TypeError, NotImplementedError):  # the program closes over arrays
        return
    with contextlib.suppress(OSError):
        file.parent.mkdir(0o700, parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=file.parent, delete=False) as temporary:
            try:
                temporary.write(hashlib.sha256(content).digest() + content)
                temporary.flush()
                os.replace(temporary.name, file)
            except OSError:
                os.unlink(temporary.name)
