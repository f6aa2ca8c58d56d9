"""Programs are kept for processes that JAX's own cache does not serve."""

import hashlib
import math
import pickle
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from jax.experimental.compilation_cache import compilation_cache
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from jax.stages import Lowered

from jtrain.parallel.devices import Device
from jtrain.parallel.program_cache import load_or_compile

DEVICES = {
    "one": lambda: jax.devices()[:1],
    "some": lambda: jax.devices()[2:4],
    "all": jax.devices,
    "all turned round": lambda: jax.devices()[::-1],
}


@pytest.fixture
def kept(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Path]:
    """Return the program directory of the second of two processes; JAX itself caches none.

    One that JAX has kept (process 0 of real processes alone has such) cannot be written down again
    on a CPU.
    """
    settings: Any = jax.config
    changed = {
        "jax_compilation_cache_dir": str(tmp_path),
        "jax_persistent_cache_min_compile_time_secs": math.inf,
    }
    before = {name: getattr(settings, name) for name in changed}
    compilation_cache.reset_cache()  # that of an earlier test, which stays open elsewhere
    for name, value in changed.items():
        jax.config.update(name, value)
    monkeypatch.setattr(jax, "process_index", lambda: 1)
    yield tmp_path / "processes"
    for name, value in before.items():
        jax.config.update(name, value)
    compilation_cache.reset_cache()


def quarters(x: jax.Array) -> dict[str, jax.Array]:
    return {"y": x / 4, "sum": x.sum()}


def traced(devices: list[Device], fn: Any = quarters) -> tuple[Lowered, jax.Array]:
    """`fn` of rows over these devices, which it is given for good; and such rows."""
    rows = NamedSharding(Mesh(np.array(devices), "rows"), P("rows"))
    x = jax.device_put(np.arange(16, dtype=np.float32), rows)
    return jax.jit(fn, donate_argnums=0).lower(x), x


def refuse(self: Lowered) -> None:
    raise AssertionError("it was compiled again")


@pytest.mark.parametrize("devices", [DEVICES["one"], DEVICES["all turned round"]])
def test_the_second_start_compiles_nothing(kept, monkeypatch, devices):
    lowered, x = traced(devices())
    first = jax.device_get(load_or_compile(lowered, x)(x))
    assert len(list(kept.iterdir())) == 1
    lowered, x = traced(devices())
    monkeypatch.setattr(Lowered, "compile", refuse)
    second = load_or_compile(lowered, x)(x)
    assert second["sum"] == first["sum"] == 120
    np.testing.assert_array_equal(second["y"], first["y"])
    np.testing.assert_array_equal(second["y"], np.arange(16) / 4)
    assert list(second["y"].sharding.mesh.devices.flat) == devices()
    assert x.is_deleted(), "it takes what it is given for good, as before"


def test_other_devices_have_another_program(kept):
    for devices in DEVICES.values():
        lowered, x = traced(devices())
        load_or_compile(lowered, x)
    assert len(list(kept.iterdir())) == len(DEVICES)


def test_what_was_not_written_whole_is_compiled_again(kept):
    lowered, x = traced(jax.devices())
    load_or_compile(lowered, x)
    (file,) = kept.iterdir()
    whole = file.read_bytes()
    flipped = bytearray(whole)
    flipped[len(whole) // 2] ^= 1
    older = pickle.dumps((b"a program", "and what it takes"))
    older = hashlib.sha256(older).digest() + older
    for broken in (b"", whole[: len(whole) // 2], b"no pickle", bytes(flipped), older):
        file.write_bytes(broken)
        lowered, x = traced(jax.devices())
        assert load_or_compile(lowered, x)(x)["sum"] == 120
        assert len(file.read_bytes()) == len(whole)


def test_nobody_else_may_write_a_program_and_none_of_another_user_is_read(kept, monkeypatch):
    lowered, x = traced(jax.devices())
    load_or_compile(lowered, x)
    (file,) = kept.iterdir()
    assert (kept.stat().st_mode & 0o777, file.stat().st_mode & 0o777) == (0o700, 0o600)
    monkeypatch.setattr("os.getuid", lambda: file.stat().st_uid + 1)
    monkeypatch.setattr("jtrain.parallel.program_cache.deserialize_and_load", refuse)
    lowered, x = traced(jax.devices())
    assert load_or_compile(lowered, x)(x)["sum"] == 120


def link(file: Path, elsewhere: Path) -> None:
    file.rename(elsewhere)
    file.symlink_to(elsewhere)


UNTRUSTED = {
    "a file that others may write": lambda file, _: file.chmod(0o660),
    "a folder that others may write": lambda file, _: file.parent.chmod(0o706),
    "a link": link,
}


@pytest.mark.parametrize("how", UNTRUSTED)
def test_no_program_is_read_that_others_may_have_written(kept, monkeypatch, tmp_path, how):
    lowered, x = traced(jax.devices())
    load_or_compile(lowered, x)
    (file,) = kept.iterdir()
    UNTRUSTED[how](file, tmp_path / "elsewhere")
    monkeypatch.setattr("jtrain.parallel.program_cache.deserialize_and_load", refuse)
    lowered, x = traced(jax.devices())
    assert load_or_compile(lowered, x)(x)["sum"] == 120


def test_a_program_that_calls_python_is_not_kept(kept):
    def shows(x: jax.Array) -> jax.Array:
        jax.debug.print("{}", x.sum())
        return x + 1

    lowered, x = traced(jax.devices(), shows)
    np.testing.assert_array_equal(load_or_compile(lowered, x)(x), np.arange(1, 17))
    assert not kept.exists()
