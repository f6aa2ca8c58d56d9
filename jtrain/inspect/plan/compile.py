"""Compilation of a step for absent devices: its text, memory and largest buffers, cached."""

import dataclasses
import gzip
import hashlib
import json
import logging
import os
import re
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
from jax.experimental.compilation_cache import compilation_cache
from jax.stages import Compiled, Lowered

from jtrain.inspect.plan.topology import Topology
from jtrain.io.regular_files import atomic_write
from jtrain.parallel.program_cache import mesh_devices
from jtrain.train.program import Program
from jtrain.train.runtime import usual_directory

_log = logging.getLogger(__name__)
_PEAK = re.compile(r"^\s+(\S+?)\{([\d,]*)\}: (\d+) bytes \(cumulative")
_ALLOCATION = re.compile(r"^allocation \d+: size (\d+),(.*)$", re.MULTILINE)
_MEMORY = ("arguments", "temporaries", "output", "aliased", "host")
LARGEST = 64  # buffers that are kept
FORMAT = 3  # of a file in the cache
PROGRAM = "*after_optimizations.txt"  # the optimized program among XLA's dump files


@dataclasses.dataclass(frozen=True)
class CompiledStep:
    """The compiler's answer for a step."""

    text: str
    """The program as XLA prints it."""
    memory: Mapping[str, int]
    """Bytes: arguments, temporaries, output, aliased, host."""
    buffers: tuple[tuple[str, str, int], ...]
    """Values in memory at the peak, largest first: instruction, element of its tuple, bytes."""
    seconds: float
    """Seconds that the compiler took."""
    too_large: str = ""
    """The compiler's message if the step needs more memory than the device has."""
    cached: bool = False
    """The answer came from the cache."""


def load_or_compile_step(program: Program, topology: Topology | None) -> CompiledStep:
    """Return the cached answer of the compiler for the step of a program, or compile it.

    Args:
        topology: of the step; None: the devices of this machine, whose answers are not cached.

    Raises:
        jax.errors.JaxRuntimeError: if the step does not compile for another reason than its memory.
    """
    lowered = program.lower_step()
    file = plan_cache() / f"{_key(lowered, program, topology)}.json.gz" if topology else None
    if file and (cached := read_step(file)) is not None:
        return cached
    with tempfile.TemporaryDirectory() as dump:
        step = _compile(lowered, Path(dump))
    if file:
        write_step(step, file)
    return step


def plan_cache() -> Path:
    """Return the folder of cached answers: `jtrain/plans` in the user's cache directory."""
    return usual_directory().parent / "plans"


def _key(lowered: Lowered, program: Program, topology: Topology) -> str:
    flags = [os.environ.get(name, "") for name in ("XLA_FLAGS", "LIBTPU_INIT_ARGS")]
    # The text of a lowered step has neither the order of the devices nor the compiler's options.
    order = [device.id for device in mesh_devices(program.resolved.abstract_state)]
    options = dict(program.resolved.strategy.compiler_options)
    parts = [FORMAT, topology.name, topology.compiler, jax.__version__, *flags, order, options]
    return hashlib.sha256("\n".join([*map(str, parts), lowered.as_text()]).encode()).hexdigest()


def _compile(lowered: Lowered, dump: Path) -> CompiledStep:
    start, too_large, memory = time.perf_counter(), "", None
    try:
        memory = _program_memory(compile_step(lowered, dump))
    except jax.errors.JaxRuntimeError as error:
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise
        too_large = str(error)
    seconds = time.perf_counter() - start
    memory = memory or _allocated(read_dump(dump, "-buffer-assignment"))
    buffers = _buffers(read_dump(dump, "-live-range"))
    return CompiledStep(read_dump(dump), memory, buffers, seconds, too_large)


def compile_step(lowered: Lowered, dump: Path) -> Compiled:
    """Compile a step, with the compiler's files in the empty folder `dump`.

    The program is read from there: `Compiled.as_text` serializes a TPU program by libtpu and parses
    it by jaxlib, which fails if libtpu is the newer of the two (jaxlib 0.10.2 and libtpu 0.0.52).

    Raises:
        jax.errors.JaxRuntimeError: if the step does not compile.
    """
    # XLA flags, documented at https://openxla.org/xla/hlo_dumps.
    options = {"xla_dump_to": str(dump), "xla_dump_hlo_as_text": True}
    settings: Any = jax.config
    cache = settings.jax_compilation_cache_dir
    settings.update("jax_compilation_cache_dir", None)  # a hit of JAX's cache writes no dump files
    compilation_cache.reset_cache()
    try:
        return lowered.compile(compiler_options=options)
    finally:
        settings.update("jax_compilation_cache_dir", cache)
        compilation_cache.reset_cache()


def read_dump(dump: Path, kind: str = "") -> str:
    """Return the text of the optimized program in `dump`, or another file of it; empty without."""
    # The largest, since the compiler may also dump small programs.
    program = max(dump.rglob(PROGRAM), key=lambda file: file.stat().st_size, default=None)
    if program is None:
        return ""
    file = program.with_name(f"{program.name.removesuffix('.txt')}{kind}.txt")
    return file.read_text(errors="replace") if file.exists() else ""


def _program_memory(program: Compiled) -> dict[str, int]:
    stats: Any = program.memory_analysis()
    return {
        "arguments": stats.argument_size_in_bytes,
        "temporaries": stats.temp_size_in_bytes,
        "output": stats.output_size_in_bytes,
        "aliased": stats.alias_size_in_bytes,
        "host": stats.host_argument_size_in_bytes + stats.host_temp_size_in_bytes,
    }


def _allocated(assignment: str) -> dict[str, int]:
    """Return the memory of a program that the compiler refused, from its buffer assignment."""
    found: dict[str, int] = dict.fromkeys(_MEMORY, 0)
    for size, rest in _ALLOCATION.findall(assignment):
        color = re.search(r"color (\d+)", rest)
        if color and color[1] != "0":
            found["host"] += int(size) * (color[1] == "5")
            continue
        is_argument, is_output = " parameter " in f" {rest}", "maybe-live-out" in rest
        found["arguments"] += int(size) * is_argument
        found["output"] += int(size) * is_output
        found["aliased"] += int(size) * (is_argument and is_output)
        found["temporaries"] += int(size) * ("preallocated-temp" in rest)
    return found


def _buffers(live_ranges: str) -> tuple[tuple[str, str, int], ...]:
    """Return the values in memory at the peak, from XLA's file of live ranges."""
    _, peak, listing = live_ranges.partition("(peak):")
    found = []
    for line in listing.splitlines()[1:] if peak else ():
        value = _PEAK.match(line)
        if value is None:
            break
        found.append((value[1], value[2], int(value[3])))
    return tuple(sorted(found, key=lambda value: -value[2])[:LARGEST])


def read_step(file: Path) -> CompiledStep | None:
    """Return the answer in a file; None if it is missing or damaged."""
    try:
        values = json.loads(gzip.decompress(file.read_bytes()))
        values["buffers"] = tuple((name, at, size) for name, at, size in values["buffers"])
        return dataclasses.replace(CompiledStep(**values), cached=True)
    except (OSError, EOFError, ValueError, TypeError, KeyError):
        return None


def write_step(step: CompiledStep, file: Path) -> None:
    """Write the answer; without space or permission the next plan compiles again."""
    content = gzip.compress(json.dumps(dataclasses.asdict(step)).encode(), 5)
    try:
        file.parent.mkdir(0o700, parents=True, exist_ok=True)
        atomic_write(file, content)
    except OSError as error:
        _log.warning(
            f"the plan is not cached, and the next one compiles again: {file.parent}: "
            f"{error.strerror or error}. Free space there, or set XDG_CACHE_HOME to another folder."
        )
