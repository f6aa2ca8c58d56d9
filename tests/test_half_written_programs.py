"""A program that is half written to the compile cache fails no test."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from full_disk import files_of_at_most
from jax.experimental.compilation_cache import compilation_cache


@pytest.fixture
def cache(tmp_path: Path):
    settings: Any = jax.config
    names = ("jax_compilation_cache_dir", "jax_persistent_cache_min_compile_time_secs")
    before = {name: getattr(settings, name) for name in names}
    for name, value in zip(names, (str(tmp_path), 0.0), strict=True):
        settings.update(name, value)
    compilation_cache.reset_cache()
    yield tmp_path
    for name, value in before.items():
        settings.update(name, value)
    compilation_cache.reset_cache()


def triple() -> Callable[[jax.Array], jax.Array]:
    """Return a function that JAX has not compiled yet."""
    return jax.jit(lambda x: x * 3 + 1)


def test_what_another_process_has_half_written_is_compiled_anew(cache: Path):
    x = jnp.ones(3)
    assert triple()(x).tolist() == [4, 4, 4]
    for program in cache.glob("*-cache"):
        program.write_bytes(program.read_bytes()[:20])
    compilation_cache.reset_cache()
    assert triple()(x).tolist() == [4, 4, 4]


def test_a_program_that_does_not_fit_on_the_disk_is_run_all_the_same(cache: Path):
    x = jnp.ones(3)
    with files_of_at_most(10):
        assert triple()(x).tolist() == [4, 4, 4]
    assert 10 in {program.stat().st_size for program in cache.glob("*-cache")}
