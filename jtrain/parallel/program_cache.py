"""Compiled programs, kept for the processes that JAX's own cache does not serve."""

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
from jax.experimental.serialize_executable import deserialize_and_load, serialize
from jax.sharding import Mesh, NamedSharding
from jax.stages import Compiled, Lowered

from jtrain.parallel.devices import Device

DIGEST = hashlib.sha256().digest_size  # bytes, before what they are of


def load_or_compile(lowered: Lowered, state: Any) -> Compiled:
    """The program, which is compiled once on this machine while JAX's compile cache is on.

    JAX keeps programs for all processes but those of CPUs after the first: only the first writes,
    and what it wrote has a name made of its own devices, under which no other looks (jax 0.10 to
    0.12). For these each program lies in a file beside JAX's.

    Args:
        state: what it takes or gives, in any tree, of leaves with shardings.
    """
    devices = _devices(state)
    file = _file(lowered, devices)
    if file is None:
        return lowered.compile()
    program = _loaded(file, lowered, devices)
    if program is None:
        program = lowered.compile()
        _keep(program, file)
    return program


def _devices(state: Any) -> Sequence[Device]:
    """Those of the first leaf that lies on a mesh, in its order; none without one."""
    for leaf in jax.tree.leaves(state):
        sharding = getattr(leaf, "sharding", None)
        if isinstance(sharding, NamedSharding) and isinstance(sharding.mesh, Mesh):
            return list(np.ravel(sharding.mesh.devices))
    return []


def _file(lowered: Lowered, devices: Sequence[Device]) -> Path | None:
    """Where this process keeps the program; None if JAX does, or nobody may."""
    settings: Any = jax.config  # their names are made as JAX starts
    where = settings.jax_compilation_cache_dir
    on = bool(where) and settings.jax_enable_compilation_cache
    if not (on and devices and devices[0].platform == "cpu" and jax.process_index() > 0):
        return None
    if "://" in where:  # JAX keeps its programs in an object store, which has no owner and mode
        return None
    text = lowered.as_text()
    if "callback" in text:  # it has addresses of this process
        return None
    ids = [device.id for device in devices]
    place = f"process {jax.process_index()} of {jax.process_count()}, devices {ids}"
    flags = os.environ.get("XLA_FLAGS", "")
    versions = [metadata.version(package) for package in ("jax", "jaxlib")]
    said = "\n".join((text, place, *versions, flags, _instructions()))
    return Path(where) / "processes" / hashlib.sha256(said.encode()).hexdigest()


def _instructions() -> str:
    """What the processor can do, where Linux says it: a program may use all of it."""
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith(("flags", "Features")):
                return line
    return ""


def _loaded(file: Path, lowered: Lowered, devices: Sequence[Device]) -> Compiled | None:
    """The program in `file`; None if there is none, none that is whole, or it is another user's.

    It is machine code like that of JAX's own files beside it, and is trusted as far (JAX unpickles
    it, too): who may write there may run what he likes. So nobody else may, and what another wrote,
    or could have, is not read. SECURITY.md names this file.
    """
    try:
        if not (_ours(file.parent) and _ours(file)):
            return None
        whole = file.read_bytes()
        digest, said = whole[:DIGEST], whole[DIGEST:]
        if hashlib.sha256(said).digest() != digest:
            return None
        takes = jax.tree.structure(lowered.args_info)
        return deserialize_and_load(said, takes, lowered.out_tree, execution_devices=devices)
    except (OSError, EOFError, ValueError, TypeError, jax.errors.JaxRuntimeError):
        return None


def _ours(path: Path) -> bool:
    """Whether this user alone may write there, and it is no link."""
    found = path.lstat()
    link, others = stat.S_ISLNK(found.st_mode), found.st_mode & (stat.S_IWGRP | stat.S_IWOTH)
    return found.st_uid == os.getuid() and not link and not others


def _keep(program: Compiled, file: Path) -> None:
    """Writes it, whole; nothing where it cannot be written, and the next run compiles it again."""
    try:
        said, _, _ = serialize(program)
    except (ValueError, TypeError, NotImplementedError):  # it closes over arrays
        return
    with contextlib.suppress(OSError):
        file.parent.mkdir(0o700, parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=file.parent, delete=False) as whole:
            try:
                whole.write(hashlib.sha256(said).digest() + said)
                whole.flush()
                os.replace(whole.name, file)
            except OSError:
                os.unlink(whole.name)
