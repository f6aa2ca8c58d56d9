"""What holds in every test: eight devices, quick compiles, no silent promotion, no warnings."""

import os

os.environ["JAX_PLATFORMS"] = "cpu"
# LLVM at -O1 compiles in 0.7 of the time. XLA's own passes, fusion among them, are those that users
# have; benchmarks/exactness.py measures with everything on.
os.environ["XLA_FLAGS"] = (
    "--xla_force_host_platform_device_count=8 --xla_backend_optimization_level=1"
)

import jax
import pytest

jax.config.update("jax_numpy_rank_promotion", "raise")


@pytest.fixture
def strict_dtypes():
    """No silent dtype promotion: for tests of models and losses."""
    with jax.numpy_dtype_promotion("strict"):
        yield
