"""One of two processes with two devices each: DIRECTORY PORT INDEX. Not a test itself."""

import contextlib
import os
import re
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    os.environ["JAX_PLATFORMS"] = "cpu"
    os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=2"

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jtrain.checkpoint import CheckpointManager, init_from, inspect, seal, storage
from jtrain.distributed.multihost import check_equal
from jtrain.errors import CheckpointError, DeviceError, PeerError


def value(step: int) -> np.ndarray:
    """Return the unsharded array of a step."""
    return np.sin(np.arange(64, dtype=np.float32) * step).reshape(8, 8)


def main(directory: Path, port: str, index: int) -> None:
    """Save some steps, restore the best under another sharding, and diverge."""
    where = f"127.0.0.1:{port}"
    jax.distributed.initialize(where, 2, index, coordinator_bind_address=where)
    mesh = jax.sharding.Mesh(np.array(jax.devices()), ("x",))
    rows = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("x"))
    columns = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec(None, "x"))
    whole = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
    key = jax.jit(lambda: jax.random.key(5), out_shardings=whole)()

    def state(step: int) -> dict:
        full = value(step)
        return {
            "w": jax.make_array_from_callback(full.shape, rows, lambda i: full[i]),
            "step": jax.device_put(jnp.int32(step), whole),
            "rng": key,
        }

    with CheckpointManager(directory, keep=1, best="loss") as checkpoints:
        for step, loss in enumerate([2.0, 1.0, 3.0, 4.0], start=1):
            checkpoints.save(step, state(step), {"step": step}, best_value=loss)
        checkpoints.wait()
        # Every process gets the same step, else they would resume from different steps.
        assert (checkpoints.steps(), checkpoints.best()) == ([2, 4], 2)
        if index == 0:  # its seal is of another step
            shutil.copytree(directory / "4", directory / "5")
        with read_files() as read:
            assert checkpoints.resume() == 4
        theirs = [path for path in read if "/4/state/ocdbt.process_1/d/" in path]
        assert bool(theirs) == (index == 1), "each reads what it wrote"
        assert len(checkpoints.notices) == (index == 0), "only one process reports"
        like = {
            "w": jax.ShapeDtypeStruct((8, 8), jnp.float32, sharding=columns),
            "step": jax.ShapeDtypeStruct((), jnp.int32, sharding=whole),
            "rng": jax.ShapeDtypeStruct((), key.dtype, sharding=whole),
        }
        back = checkpoints.restore(2, like)
        assert back["w"].sharding == columns
        for shard in back["w"].addressable_shards:
            assert np.array_equal(shard.data, value(2)[shard.index])
        assert jax.random.key_data(back["rng"]).tolist() == [0, 5]
        drifted = value(9) + np.float32(index)  # in replicas of one array
        w = jax.make_array_from_callback(drifted.shape, whole, lambda i: drifted[i])
        checkpoints.save(9, {"w": w}, {})
        expected = (DeviceError, "w: cpu:") if index == 0 else (CheckpointError, "was not sealed")
        with pytest.raises(expected[0], match=expected[1]):
            checkpoints.wait()
        assert 9 not in checkpoints.steps()
        read_otherwise(checkpoints, like, index)
    with pytest.MonkeyPatch.context() as patch:
        if index:  # as if the other process had saved a step between two listings
            patch.setattr(inspect, "resolve_step", lambda *_: 2)
        assert init_from.open_source(str(directory)).where == str(directory / "4")
    apart(index)
    with CheckpointManager(directory) as checkpoints:
        if index == 0:
            file = next((directory / "4/state/ocdbt.process_1/d").iterdir())
            file.write_bytes(file.read_bytes()[:-1] + b"?")
        check_equal({}, "the file is changed")
        assert checkpoints.resume() == 2
        if index == 0:
            assert re.search(r"process_1/d/\w+: its digest is", checkpoints.notices[0])


@contextlib.contextmanager
def read_files() -> Iterator[list[str]]:
    """Yield the paths of the files of which a digest is taken meanwhile."""
    found: list[str] = []
    digest = seal.digest
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            seal, "digest", lambda path, *rest: found.append(str(path)) or digest(path, *rest)
        )
        yield found


def read_otherwise(checkpoints: CheckpointManager, like: dict, index: int) -> None:
    """Restore a replicated leaf of which process 1 reads another bit than was saved."""
    right = storage.read

    def wrong(*args: Any, **words: Any) -> dict:
        found = right(*args, **words)
        return {**found, "step": found["step"] + 1} if index else found

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(storage, "read", wrong)
        with pytest.raises(DeviceError, match=r"4: process 1 read other values than were saved"):
            checkpoints.restore(4, like)
    assert checkpoints.restore(4, like)["step"] == 4, "it was not set aside"


def apart(index: int) -> None:
    """Check that values that differ between processes are refused."""
    check_equal({"the key": "1", f"part {index}": f"{index}"}, "at step 3")
    with pytest.raises(PeerError, match=r"at step 3 .* the key is .* in process [01], and"):
        check_equal({"the config": "same", "the key": f"{index}"}, "at step 3")


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]))
