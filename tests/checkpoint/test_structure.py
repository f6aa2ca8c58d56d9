"""What a checkpoint gives to a state of another structure: all differences, or a plan."""

import shutil
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from checkpoint_states import like, same_bits
from safetensors.numpy import save_file

from jtrain.checkpoint import CheckpointManager, leaf_table, plan_weights
from jtrain.config.sections import InitFrom
from jtrain.core import pytree
from jtrain.core.pytree import named_leaves
from jtrain.errors import CheckpointError, ConfigError
from jtrain.parallel import FSDP

LEAVES = {
    "params": {"kernel": jnp.ones((4, 6)), "bias": jnp.ones(6, jnp.bfloat16)},
    "opt_state": ({"mu": jnp.ones((4, 6))}, jnp.int32(3)),
    "rng": jax.random.key(0),
    "step": jnp.int32(7),
}
NAMES = list(pytree.named_leaves(LEAVES))


def without(name: str) -> dict[str, jax.Array]:
    return {other: leaf for other, leaf in pytree.named_leaves(LEAVES).items() if other != name}


def another(how: str, name: str) -> tuple[dict, str]:
    """Return a state that differs in one leaf in one way, and the expected row."""
    leaf = pytree.named_leaves(LEAVES)[name]
    was = pytree.describe(LEAVES)[name]
    if how == "missing":
        return without(name), f"{name}  -  {was}"
    if how == "extra":
        there = {**pytree.named_leaves(LEAVES), f"{name}_too": jnp.zeros(3)}
        return there, f"{name}_too  float32[3]  -"
    if how == "renamed":
        return {**without(name), f"{name}x": leaf}, f"{name}x  {was}  -  {name}"
    if how == "shape":
        new = jnp.zeros((*leaf.shape, 2), jnp.float32)
        told = f"float32{list(new.shape)}"
        return {**without(name), name: new}, f"{name}  {told}  {was}"
    other = jnp.float16 if was.startswith("int32") else jnp.int8
    new = jnp.zeros(leaf.shape, other)
    return {**without(name), name: new}, f"{name}  {new.dtype}{list(new.shape)}  {was}"


HOWS = ("missing", "extra", "renamed", "shape", "dtype")
CASES = [(how, name) for how in HOWS for name in NAMES]


@pytest.mark.thorough
@pytest.mark.parametrize("cast", [False, True], ids=["", "cast"])
def test_every_difference_of_one_leaf_is_a_row_with_its_nearest_name(cast: bool):
    found = pytree.describe(LEAVES)
    refused = 0
    for how, name in CASES:
        state, row = another(how, name)
        if cast and how == "dtype" and name != "rng":
            asked = leaf_table.check_same(found, state, "checkpoint 5", cast=True)
            assert str(asked[name].dtype) == str(pytree.named_leaves(LEAVES)[name].dtype)
            continue
        with pytest.raises(CheckpointError) as refusal:
            leaf_table.check_same(found, state, "checkpoint 5", cast=cast)
        rows = [" ".join(line.split()) for line in str(refusal.value).splitlines()]
        assert " ".join(row.split()) in rows, f"{how} of {name}"
        refused += 1
    assert refused == len(CASES) - 5 * cast


@pytest.mark.thorough
def test_a_leaf_is_cast_only_on_request(tmp_path: Path):
    state = {"w": jnp.linspace(-3, 3, 12).reshape(3, 4), "n": jnp.int32(7)}
    asked = {
        "w": jax.ShapeDtypeStruct((3, 4), jnp.bfloat16, sharding=state["w"].sharding),
        "n": jax.ShapeDtypeStruct((), np.float32),
    }
    with CheckpointManager(tmp_path) as checkpoints:
        checkpoints.save(1, state, {})
        with pytest.raises(CheckpointError, match="2 leaves differ"):
            checkpoints.restore(1, asked)
        back = checkpoints.restore(1, asked, cast=True)
        assert same_bits(back["w"], state["w"].astype(jnp.bfloat16))
        assert back["w"].sharding == state["w"].sharding
        assert (type(back["n"]), back["n"].dtype, back["n"]) == (np.ndarray, np.float32, 7)
        assert same_bits(checkpoints.restore(1, like(state), cast=True), state)


MESHED = FSDP(devices=4, min_size=0).build()
BLOCK = {"norm": {"scale": (8,)}, "up": {"kernel": (8, 16), "bias": (16,)}}
SHAPES = {"tokens": (12, 8), "blocks": {"0": BLOCK, "1": BLOCK}, "head": (8, 12)}
EXTRA = {"norm": {"mean": (8,)}}


def tree(seed: int, shapes=SHAPES):
    draw = np.random.default_rng(seed)
    leaf = lambda shape: draw.standard_normal(shape).astype(np.float32)
    return jax.tree.map(leaf, shapes, is_leaf=lambda x: isinstance(x, tuple))


PARAMS, STATE = tree(0), tree(1, EXTRA)


def shard(params=None, extra=None):
    """Return the initial weights of a model, sharded over four devices."""
    weights = (tree(2) if params is None else params, tree(3, EXTRA) if extra is None else extra)
    return jax.device_put(weights, MESHED.shardings(weights))


@pytest.fixture(scope="module", name="stored")
def _stored(tmp_path_factory) -> str:
    """Save a checkpoint of PARAMS and STATE, and other values of a state."""
    directory = tmp_path_factory.mktemp("stored") / "checkpoints"
    with CheckpointManager(directory) as checkpoints:
        state = {"params": PARAMS, "extra": STATE, "opt_state": {"mu": PARAMS}, "step": np.int32(7)}
        checkpoints.save(7, state, {})
    return str(directory / "7")


def as_torch(params) -> dict[str, np.ndarray]:
    """Return PARAMS by the names of another library, kernels transposed."""
    found = {"wte.weight": params["tokens"], "lm_head.weight": params["head"].T}
    for i, block in params["blocks"].items():
        found[f"h.{i}.ln_1.weight"] = block["norm"]["scale"]
        found[f"h.{i}.mlp.weight"] = block["up"]["kernel"].T
        found[f"h.{i}.mlp.bias"] = block["up"]["bias"]
    return {f"transformer.{n}": np.ascontiguousarray(a) for n, a in found.items()}


RENAME = (
    ("transformer/wte/weight", "tokens"),
    ("transformer/lm_head/weight", "head"),
    ("transformer/h/*/ln_1/weight", "blocks/*/norm/scale"),
    ("transformer/h/*/mlp/weight", "blocks/*/up/kernel"),
    ("transformer/h/*/mlp/bias", "blocks/*/up/bias"),
)
TRANSPOSE = ("*/kernel", "head")


@pytest.fixture(scope="module", name="file")
def _file(tmp_path_factory) -> str:
    path = tmp_path_factory.mktemp("file") / "model.safetensors"
    save_file(as_torch(PARAMS), path)
    return str(path)


def check_equal(got, want) -> None:
    jax.tree.map(np.testing.assert_array_equal, got, want)


def check_shardings(got, like) -> None:
    for name, leaf in named_leaves(got).items():
        other = named_leaves(like)[name]
        assert (leaf.sharding, leaf.dtype) == (other.sharding, other.dtype), name


def test_a_checkpoint_is_loaded_in_the_shardings_of_the_model(stored):
    weights = shard()
    assert len(weights[0]["tokens"].sharding.device_set) == 4
    assert not weights[0]["tokens"].is_fully_replicated
    start = plan_weights(InitFrom(path=stored), *weights)
    params, extra = start.read(weights)
    check_equal(params, PARAMS)
    check_shardings((params, extra), weights)
    check_equal(extra, weights[1])
    assert (start.left, start.missing, start.unused) == ((), (), ())
    assert plan_weights(InitFrom(path=stored, extra=True), *weights).unused == ()


def test_extra_is_loaded_on_request(stored):
    weights = shard()
    params, extra = plan_weights(InitFrom(path=stored, extra=True), *weights).read(weights)
    check_equal((params, extra), (PARAMS, STATE))
    only = InitFrom(path=stored, extra=True, include=("extra/*",))
    params, extra = plan_weights(only, *weights).read(weights)
    check_equal((params, extra), (weights[0], STATE))


def test_tensors_are_renamed_and_transposed(file):
    weights = shard()
    start = plan_weights(InitFrom(path=file, rename=RENAME, transpose=TRANSPOSE), *weights)
    params, extra = start.read(weights)
    check_equal(params, PARAMS)
    check_shardings((params, extra), weights)


def test_leaves_are_cast_to_the_dtypes_of_the_model(stored, file):
    weights = shard(jax.tree.map(lambda x: x.astype(jnp.bfloat16), tree(2)))
    for asked in (InitFrom(path=stored), InitFrom(path=file, rename=RENAME, transpose=TRANSPOSE)):
        params, _ = plan_weights(asked, *weights).read(weights)
        check_equal(params, jax.tree.map(lambda x: jnp.asarray(x, jnp.bfloat16), PARAMS))
        check_shardings(params, weights[0])


def test_leaves_that_are_not_loaded_start_from_the_seed(stored):
    weights = shard({**tree(2), "new": np.ones(3, np.float32)})
    asked = InitFrom(path=stored, exclude=("head", "*/1/*"), partial=True)
    start = plan_weights(asked, *weights)
    params, _ = start.read(weights)
    check_equal(params["blocks"]["0"], PARAMS["blocks"]["0"])
    for name in ("head", "new"):
        check_equal(params[name], weights[0][name])
    check_equal(params["blocks"]["1"], weights[0]["blocks"]["1"])
    assert start.missing == ("new",)
    assert set(start.left) == {n for n in named_leaves(PARAMS) if n == "head" or "/1/" in n}
    only = plan_weights(InitFrom(path=stored, include=("tokens",)), *weights)
    assert set(only.loaded) == {"tokens"}


def test_all_leaves_that_do_not_fit_are_listed(file):
    params = {**tree(2), "tokens": np.ones((12, 9), np.float32), "head": np.ones((8, 12), np.int32)}
    params["blocks"]["1"]["up"]["biases"] = params["blocks"]["1"]["up"].pop("bias")
    with pytest.raises(CheckpointError) as error:
        plan_weights(InitFrom(path=file, rename=RENAME, transpose=("head",)), params, ())
    told = str(error.value)
    assert "should give 8 leaves, and 5 do not fit" in told
    rows = [tuple(line.split("  ")) for line in told.splitlines()]
    rows = {tuple(cell.strip() for cell in row if cell.strip()) for row in rows}
    assert rows > {
        ("tokens", "float32[12, 9]", "float32[12, 8]"),
        ("head", "int32[8, 12]", "float32[12, 8]"),
        ("blocks/0/up/kernel", "float32[8, 16]", "float32[16, 8]", "transposed"),
        ("blocks/1/up/kernel", "float32[8, 16]", "float32[16, 8]", "transposed"),
        ("blocks/1/up/biases", "float32[16]", "-", "blocks/1/up/bias"),
    }
    assert "init_from.rename" in told
    assert "init_from.partial=true" in told


def test_a_new_head_is_advised_where_the_source_has_one_of_another_size(tmp_path):
    found = {"head/kernel": np.ones((8, 12), np.float32), "head/bias": np.ones(12, np.float32)}
    path = tmp_path / "classes.safetensors"
    save_file({"tokens": PARAMS["tokens"], **found}, path)
    params = {"tokens": PARAMS["tokens"], "head": tree(2, {"kernel": (8, 10), "bias": (10,)})}
    with pytest.raises(CheckpointError, match=r"init_from\.exclude='\[head/\*\]'"):
        plan_weights(InitFrom(path=str(path)), params, ())
    mended = InitFrom(path=str(path), exclude=("head/*",))
    assert set(plan_weights(mended, params, ()).loaded) == {"tokens"}


PATTERNS = {
    "exclude": (InitFrom(exclude=("head", "had")), r"exclude\[1\] is 'had'.*Nearest: head"),
    "rename": (InitFrom(rename=(("hed", "head"),)),
        r"rename\[0\] is 'hed'.*of the source. Nearest: head"),
    "two of one name": (InitFrom(rename=(("head", "tokens"),)),
        "rename calls two leaves tokens: .*before the others"),
}  # fmt: skip


@pytest.mark.parametrize("case", PATTERNS)
def test_a_pattern_without_a_match_is_refused(case, stored):
    asked, told = PATTERNS[case]
    asked = InitFrom(**{**vars(asked), "path": stored})
    with pytest.raises(ConfigError, match=told):
        plan_weights(asked, PARAMS, ())


def test_a_damaged_checkpoint_is_refused(stored, tmp_path):
    copy = tmp_path / "checkpoints" / "7"
    shutil.copytree(stored, copy)
    largest = max((p for p in copy.rglob("*") if p.is_file()), key=lambda p: p.stat().st_size)
    largest.unlink()
    with pytest.raises(CheckpointError, match=r"checkpoint 7 is damaged.* is missing"):
        plan_weights(InitFrom(path=str(copy)), PARAMS, ())
