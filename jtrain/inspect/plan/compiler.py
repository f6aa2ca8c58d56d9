"""Compilation of a step for other devices, with the text of the compiled program."""

from pathlib import Path
from typing import Any, NamedTuple

import jax
from jax.stages import Compiled, Lowered

from jtrain.inspect.plan.compiler_logging import suppress_stderr
from jtrain.train.compilation_cache import without_compilation_cache

PROGRAM = "*after_optimizations.txt"  # the optimized program among XLA's dump files


class CompilerOutput(NamedTuple):
    """A compiled program and its text."""

    program: Compiled
    text: str  # the program as XLA prints it; empty if unreadable
    unread: str = ""  # why it is unreadable


def compile_and_read(lowered: Lowered, dump: Path) -> CompilerOutput:
    """Compile a step, and read its program from the compiler's dump files.

    `Compiled.as_text` serializes a TPU program by libtpu and parses it by jaxlib, which fails if
    libtpu is the newer of the two (jaxlib 0.10.2 and libtpu 0.0.52: "async-update instruction
    should have 1 operands but sees 3").

    Args:
        dump: an empty folder for the files.

    Raises:
        jax.errors.JaxRuntimeError: if the step does not compile.
    """
    # XLA flags, documented at https://openxla.org/xla/hlo_dumps.
    options = {"xla_dump_to": str(dump), "xla_dump_hlo_as_text": True}
    with without_compilation_cache():
        program = lowered.compile(compiler_options=options)
    return read_program(program, dump)


def read_program(program: Compiled, dump: Path) -> CompilerOutput:
    """Return a program with its text, from the files in `dump` or else from the program itself."""
    if file := find_program_file(dump):
        return CompilerOutput(program, file.read_text(errors="replace"))
    try:
        with suppress_stderr():  # jaxlib prints its stack trace
            return CompilerOutput(program, program.as_text() or "")
    except jax.errors.JaxRuntimeError as error:
        return CompilerOutput(
            program, "", f"jaxlib cannot read the program: {str(error).splitlines()[0]}"
        )


def find_program_file(dump: Path) -> Path | None:
    """Return the file of the optimized program in `dump`; None without one."""
    # The largest, since the compiler may also dump small programs.
    return max(dump.rglob(PROGRAM), key=lambda file: file.stat().st_size, default=None)


def program_memory(program: Compiled) -> dict[str, int]:
    """Return the bytes of a program on a device; `host` are those in the memory of the host."""
    stats: Any = program.memory_analysis()
    return {
        "arguments": stats.argument_size_in_bytes,
        "temporaries": stats.temp_size_in_bytes,
        "output": stats.output_size_in_bytes,
        "aliased": stats.alias_size_in_bytes,
        "host": stats.host_argument_size_in_bytes + stats.host_temp_size_in_bytes,
    }
