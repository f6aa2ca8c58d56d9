"""A restored state equals the saved one, for any leaves and any sharding."""

import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from checkpoint_states import State, like, make_state, same_bits
from one_of_two import value
from two_processes import in_two_processes

from jtrain.checkpoint import CheckpointManager, lock
from jtrain.errors import CheckpointError


@pytest.fixture
def checkpoints(tmp_path: Path):
    with CheckpointManager(tmp_path / "checkpoints") as made:
        yield made


def names(directory: Path) -> list[str]:
    """Return the names in a directory, without the lock file."""
    return sorted(p.name for p in directory.iterdir() if p.name != lock.NAME)


def sharding(devices: int, axes: str, *spec: str | None):
    shape = (devices,) if len(axes) == 1 else (devices // 2, 2)
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:devices]).reshape(shape), tuple(axes))
    return jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec(*spec))


def test_restores_every_bit_and_every_container(checkpoints: CheckpointManager):
    state = make_state(3)
    checkpoints.save(3, state, {})
    back = checkpoints.restore(3, like(state))
    assert same_bits(back, state)
    assert isinstance(back, State)
    assert type(back.opt_state[0]) is type(state.opt_state[0])
    assert jax.random.key_impl(back.rng["rbg"]) == jax.random.key_impl(state.rng["rbg"])
    assert not same_bits(back, make_state(4)), "the comparison must see differences"
    for there, here in zip(jax.tree.leaves(back), jax.tree.leaves(state), strict=True):
        assert there.sharding.is_equivalent_to(here.sharding, here.ndim)


def test_restores_numpy_without_a_sharding(checkpoints: CheckpointManager):
    state = {
        "w": jnp.arange(6.0).reshape(2, 3),
        "step": jnp.int32(4),
        "host": np.arange(3, dtype=">i8"),
    }
    state["host"] = state["host"].astype(np.int64)
    checkpoints.save(1, state, {})
    asked = {k: jax.ShapeDtypeStruct(v.shape, v.dtype) for k, v in state.items()}
    back = checkpoints.restore(1, asked)
    assert {k: type(v) for k, v in back.items()} == dict.fromkeys(state, np.ndarray)
    assert same_bits(back, state)


@pytest.mark.thorough
def test_arrays_may_be_donated_as_soon_as_save_returns(checkpoints: CheckpointManager):
    change = jax.jit(lambda x: x * 0 - 1, donate_argnums=0)
    x = jnp.arange(4_000_000, dtype=jnp.float32)
    for step in range(3):
        expected = np.array(x)
        checkpoints.save(step, {"x": x}, {})
        x = change(x)
        assert x[0] == -1
        back = checkpoints.restore(step, like({"x": x}))
        np.testing.assert_array_equal(back["x"], expected)
        x = jnp.arange(4_000_000, dtype=jnp.float32) + step


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("devices", "axes", "spec"), [(1, "a", ()), (4, "a", (None, "a")), (8, "ab", ("b", "a"))]
)
def test_restores_into_any_layout(tmp_path: Path, devices: int, axes: str, spec: tuple):
    weights = jnp.asarray(np.random.default_rng(0).normal(size=(16, 24)), jnp.float32)
    saved = {"w": jax.device_put(weights, sharding(8, "fsdp"[:1], "f")), "step": jnp.int32(1)}
    key = jax.device_put(jax.random.key(1), sharding(8, "f"))
    with CheckpointManager(tmp_path) as checkpoints:
        checkpoints.save(1, {**saved, "rng": key}, {})
        target = sharding(devices, axes, *spec)
        whole = sharding(devices, axes)
        asked = {
            "w": jax.ShapeDtypeStruct(weights.shape, weights.dtype, sharding=target),
            "step": jax.ShapeDtypeStruct((), jnp.int32, sharding=whole),
            "rng": jax.ShapeDtypeStruct((), key.dtype, sharding=whole),
        }
        back = checkpoints.restore(1, asked)
    assert back["w"].sharding == target
    assert back["rng"].sharding.is_equivalent_to(whole, 0)
    np.testing.assert_array_equal(back["w"], weights)
    assert same_bits(back["rng"], key)


@pytest.mark.parametrize(
    ("keep", "best", "values", "kept", "expected_best"),
    [
        (2, "", [3, 1, 2, 4], [3, 4], None),
        (1, "highest accuracy", [3, 1, 2, 1], [1, 4], 1),
        (1, "loss", [None, 7, None, float("nan")], [2, 4], 2),
        (0, "loss", [4, 3, 2, 5], [1, 2, 3, 4], 3),
    ],
)
def test_retains_the_newest_and_the_best(tmp_path, keep, best, values, kept, expected_best):
    with CheckpointManager(tmp_path, keep=keep, best=best) as checkpoints:
        for step, value in enumerate(values, start=1):
            checkpoints.save(step, {"step": jnp.int32(step)}, {}, best_value=value)
        checkpoints.wait()
        assert checkpoints.steps() == kept
        assert checkpoints.best() == expected_best
        assert checkpoints.newest() == 4
        assert names(tmp_path) == sorted(map(str, kept))
    # Another manager sees the same: nothing is only in memory.
    again = CheckpointManager(tmp_path, keep=keep, best=best)
    assert (again.steps(), again.best()) == (kept, expected_best)


def test_the_first_of_each_n_steps_is_retained_for_good(tmp_path):
    with CheckpointManager(tmp_path, keep=1, keep_every=10) as checkpoints:
        for step in (4, 8, 12, 16, 20, 24, 41):
            checkpoints.save(step, {"step": jnp.int32(step)}, {})
        checkpoints.wait()
        assert checkpoints.steps() == [12, 20, 41]
        assert checkpoints.make_room() == []


def test_a_best_by_another_metric_does_not_count(tmp_path: Path):
    with CheckpointManager(tmp_path, best="loss") as checkpoints:
        checkpoints.save(1, {"step": jnp.int32(1)}, {}, best_value=-5.0)
    with CheckpointManager(tmp_path, best="highest accuracy") as checkpoints:
        assert checkpoints.best() is None
        checkpoints.save(2, {"step": jnp.int32(2)}, {}, best_value=0.5)
        checkpoints.wait()
        assert checkpoints.best() == 2


def test_a_second_save_of_a_step_replaces_the_first(checkpoints: CheckpointManager):
    for saved in (1, 2):
        checkpoints.save(7, {"x": jnp.int32(saved)}, {"value": saved})
    back = checkpoints.restore(7, like({"x": jnp.int32(0)}))
    assert (int(back["x"]), checkpoints.about(7), checkpoints.steps()) == (2, {"value": 2}, [7])
    assert names(checkpoints.directory) == ["7"]


def test_resumes_from_a_checkpoint_that_was_being_replaced_at_a_kill(tmp_path: Path):
    with CheckpointManager(tmp_path) as before:
        for step in (1, 2):
            before.save(step, make_state(step), {})
    (tmp_path / "2").rename(tmp_path / "2.replaced")  # the second rename did not happen
    with CheckpointManager(tmp_path) as after:
        assert after.resume() == 2
    assert same_bits(after.restore(2, like(make_state(2))), make_state(2))


def test_about_is_stored_with_the_checkpoint(checkpoints: CheckpointManager):
    about = {"config": "name: a\nlr: 1e-3\n", "versions": {"jax": jax.__version__}, "loss": 1.25}
    checkpoints.save(1, {"x": jnp.int32(1)}, about)
    checkpoints.wait()
    assert checkpoints.about(1) == about
    stored = json.loads((checkpoints.directory / "1" / "about.json").read_text())
    assert stored["leaves"] == {"x": "int32[]"}


def test_reading_a_directory_changes_nothing(tmp_path: Path):
    directory = tmp_path / "runs" / "checkpoints"
    looking = CheckpointManager(directory)
    assert (looking.steps(), looking.newest(), looking.best()) == ([], None, None)
    assert not directory.exists()
    (directory / "5.saving").mkdir(parents=True)
    assert CheckpointManager(directory).steps() == []
    assert (directory / "5.saving").exists(), "another process may be writing it"
    looking.close()


@pytest.mark.parametrize(
    ("state", "about", "advice"),
    [
        ({}, {}, "no leaves"),
        ({"lr": 0.1}, {}, "lr is 0.1: convert it (jnp.asarray)"),
        ({"a/b": np.zeros(2), "a": {"b": np.zeros(3)}}, {}, "both called a/b"),
        ({"x": np.zeros(2)}, {"loss": np.float32(1)}, "float(x) converts an array"),
    ],
)
def test_a_state_that_cannot_be_stored_is_refused(checkpoints, state, about, advice):
    with pytest.raises(CheckpointError) as refusal:
        checkpoints.save(1, state, about)
    assert advice in str(refusal.value)
    assert checkpoints.steps() == []


SCRIPT = Path(__file__).with_name("one_of_two.py")


@pytest.mark.thorough  # tests/train/test_process_matrix.py saves in two processes by default
def test_two_processes_save_what_one_restores(tmp_path: Path):
    words = lambda port, index: (tmp_path / "c", port, str(index))
    in_two_processes(SCRIPT, words, patience=300)
    one = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    checkpoints = CheckpointManager(tmp_path / "c")
    assert checkpoints.steps() == [2]
    assert (tmp_path / "c" / "5.damaged").is_dir(), "both resumed from 4"
    assert (tmp_path / "c" / "4.damaged").is_dir(), "the second found what it had written changed"
    like = {
        "w": jax.ShapeDtypeStruct((8, 8), jnp.float32, sharding=one),
        "step": jax.ShapeDtypeStruct((), jnp.int32, sharding=one),
        "rng": jax.eval_shape(lambda: jax.random.key(0)).update(sharding=one),
    }
    back = checkpoints.restore(2, like)
    np.testing.assert_array_equal(back["w"], value(2))
    assert int(back["step"]) == 2
    assert jax.random.key_data(back["rng"]).tolist() == [0, 5]
