"""What holds in every test: eight devices, no silent rank promotion, no warnings."""

import os

os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=8"

import jax
import pytest

jax.config.update("jax_numpy_rank_promotion", "raise")


@pytest.fixture
def strict_dtypes():
    """No silent dtype promotion: for tests of models and losses."""
    with jax.numpy_dtype_promotion("strict"):
        yield
