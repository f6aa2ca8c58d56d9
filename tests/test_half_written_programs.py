"""A program that another process has half written to the compile cache fails no test."""

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest
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


def test_a_half_written_program_is_compiled_anew(cache: Path):
    def tripled(x: jax.Array) -> jax.Array:
        return x * 3 + 1

    x = jnp.ones(3)
    assert jax.jit(tripled).lower(x).compile()(x).tolist() == [4, 4, 4]
    (program,) = cache.glob("jit_tripled-*-cache")
    program.write_bytes(program.read_bytes()[:20])
    compilation_cache.reset_cache()
    assert jax.jit(tripled).lower(x).compile()(x).tolist() == [4, 4, 4]
