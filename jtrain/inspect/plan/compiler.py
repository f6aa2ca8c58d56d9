"""A step compiled for other devices, and the text of the program that the compiler made of it."""

from pathlib import Path
from typing import NamedTuple

import jax
from jax.stages import Compiled, Lowered

from jtrain.inspect.plan.compiler_logging import quiet_stderr

PROGRAM = "*after_optimizations.txt"  # of the files that XLA dumps, the program as it runs


class CompilerOutput(NamedTuple):
    """What the compiler gave."""

    program: Compiled
    text: str  # the program as XLA prints it; empty where it could not be read
    unread: str = ""  # why it could not be read


def compile_and_read(lowered: Lowered, dump: Path) -> CompilerOutput:
    """Compile a step, and read its program from the files that the compiler writes.

    `Compiled.as_text` takes another way: of a program for TPUs libtpu makes bytes, which jaxlib
    reads back. That ends in an error where libtpu is the newer of the two (jaxlib 0.10.2 and libtpu
    0.0.52: "async-update instruction should have 1 operands but sees 3").

    Args:
        dump: an empty folder, for the files.

    Raises:
        jax.errors.JaxRuntimeError: if the step does not compile.
    """
    # A flag of XLA's, documented at https://openxla.org/xla/hlo_dumps.
    options = {"xla_dump_to": str(dump), "xla_dump_hlo_as_text": True}
    return read(lowered.compile(compiler_options=options), dump)


def read(program: Compiled, dump: Path) -> CompilerOutput:
    """Return a program with its text, from the files in `dump` or else from the program itself."""
    written = sorted(dump.rglob(PROGRAM), key=lambda file: file.stat().st_size)
    if written:  # the largest: the compiler may have made small programs on its way
        return CompilerOutput(program, written[-1].read_text(errors="replace"))
    try:
        with quiet_stderr():  # jaxlib prints its stack there
            return CompilerOutput(program, program.as_text() or "")
    except jax.errors.JaxRuntimeError as error:
        return CompilerOutput(
            program, "", f"jaxlib cannot read the program: {str(error).splitlines()[0]}"
        )
