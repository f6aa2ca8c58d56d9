"""The text of a compiled program comes from the compiler's files, else from the program."""

import jax
import jax.numpy as jnp
import pytest
from jax.stages import Compiled

from jtrain.inspect.plan.compiler import compile_and_read, read_program
from jtrain.inspect.plan.format import format_plan
from jtrain.inspect.plan.hlo import HloProgram
from jtrain.inspect.plan.plan import Plan
from jtrain.train.compilation_cache import enable_compilation_cache

# The error of jaxlib 0.10.2 for a program of libtpu 0.0.52.
SAID = (
    "INTERNAL: RET_CHECK failure (external/xla/xla/hlo/ir/hlo_instruction.cc:390) "
    "proto.operand_ids_size() == *arity async-update instruction should have 1 operands but sees 3"
)


class Unreadable(Compiled):
    """A program that jaxlib cannot read back."""

    def __init__(self):
        pass

    def as_text(self) -> str:
        raise jax.errors.JaxRuntimeError(f"{SAID}\n*** Begin stack trace ***")


@pytest.fixture(scope="module")
def lowered():
    return jax.jit(lambda x: jnp.tanh(x @ x)).lower(jax.ShapeDtypeStruct((8, 8), jnp.float32))


def test_the_program_is_read_from_dump_files(lowered, tmp_path):
    output = compile_and_read(lowered, tmp_path)
    assert HloProgram(output.text).entry
    assert not output.unread
    assert read_program(Unreadable(), tmp_path).text == output.text


def test_a_program_in_the_compilation_cache_is_compiled_again(lowered, tmp_path, monkeypatch):
    monkeypatch.setenv("JAX_COMPILATION_CACHE_DIR", str(tmp_path / "cache"))
    before = jax.config.jax_compilation_cache_dir
    enable_compilation_cache()
    try:
        for name in ("first", "second"):
            (tmp_path / name).mkdir()
            compile_and_read(lowered, tmp_path / name)
            found = list((tmp_path / name).glob("*-live-range.txt"))
            assert found, "the buffers at the peak, which a hit of the cache would not write"
    finally:
        jax.config.update("jax_compilation_cache_dir", before)


def test_without_files_the_text_comes_from_the_program(lowered, tmp_path):
    program = lowered.compile()
    assert read_program(program, tmp_path).text == program.as_text()


def test_an_unreadable_program_keeps_the_rest_of_the_plan(tmp_path):
    output = read_program(Unreadable(), tmp_path)
    assert output.text == ""
    assert output.unread == f"jaxlib cannot read the program: {SAID}"


def test_the_table_lists_unread_collectives():
    memory = dict.fromkeys(["arguments", "temporaries", "output", "aliased", "host", "limit"], 0)
    found = Plan(
        "v5p:2x2x2", 8, {"fsdp": 8}, memory, 0, (), 1.0, unread=("no collective: because",)
    )
    assert "  not read: no collective: because" in format_plan(found).splitlines()
    assert found.plain()["unread"] == ["no collective: because"]
    alone = Plan("v5e:1x1", 1, {"data": 1}, memory, 0, (), 1.0)
    assert "  nothing" in format_plan(alone).splitlines()
