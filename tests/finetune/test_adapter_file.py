"""Adapters as files: saved alone, read again, merged, and refused on another base."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from comparison import assert_close, bitwise

from jtrain.errors import CheckpointError
from jtrain.finetune.adapter_file import merge, read_adapter, write_adapter
from jtrain.finetune.lora import Lora, build_adapter
from jtrain.io.write_safetensors import write_safetensors

DRAW = np.random.default_rng(0)
normal = lambda *shape: jnp.asarray(DRAW.normal(size=shape), jnp.float32)
BASE = {"up": {"kernel": normal(2, 16, 24)}, "down": {"kernel": normal(24, 16)}, "bias": normal(3)}
DIMS = {"up/kernel": ("layers", "width", "hidden")}


def saved(path, *on: str, frozen="as_is", base=BASE):
    adapter = build_adapter(Lora(rank=2, alpha=3, on=on, frozen=frozen), base, DIMS)
    params, extra = adapter.attach((base, ()), jax.random.key(0))
    params = jax.tree.map(lambda leaf: normal(*leaf.shape), params)
    write_adapter(path, adapter, params, extra)
    return adapter, params, extra


@pytest.mark.sampled(3)
@pytest.mark.parametrize("frozen", ["as_is", "bfloat16", "int8", "nf4"])
def test_comes_back_and_merges_to_the_weights_of_the_run(tmp_path, frozen):
    path = tmp_path / "one.safetensors"
    adapter, params, extra = saved(path, "*", frozen=frozen)
    found = read_adapter(path)
    assert found.adapter == adapter
    assert bitwise(found.params, params)
    assert path.stat().st_size < 8000
    want = adapter.join(params, extra, merged=True)
    assert_close(merge(BASE, found)["up"]["kernel"], want["up"]["kernel"], 1e-6)
    assert_close(merge(BASE, found)["down"]["kernel"], want["down"]["kernel"], 1e-6)


def test_several_are_added_each_times_its_factor(tmp_path):
    one, two = (tmp_path / f"{name}.safetensors" for name in ("one", "two"))
    _, a, _ = saved(one, "*")
    _, b, _ = saved(two, "up/*")
    got = merge(BASE, read_adapter(one), (read_adapter(two), 0.5))
    term = lambda params, name: np.float64(params[name]["a"]) @ np.float64(params[name]["b"])
    want = BASE["up"]["kernel"] + 1.5 * (term(a, "up/kernel") + 0.5 * term(b, "up/kernel"))
    assert_close(got["up"]["kernel"], want, 1e-6)
    assert_close(got["down"]["kernel"], BASE["down"]["kernel"] + 1.5 * term(a, "down/kernel"), 1e-6)


def test_an_adapter_of_another_base_is_refused_with_the_leaves(tmp_path):
    saved(tmp_path / "one.safetensors", "*")
    found = read_adapter(tmp_path / "one.safetensors")
    other = {**BASE, "bias": BASE["bias"].at[0].add(1e-7)}
    with pytest.raises(
        CheckpointError, match=r"another base: 1 of 3 leaves with other values.*bias"
    ):
        merge(other, found)
    with pytest.raises(CheckpointError, match="only one of them has, such as bias"):
        merge({name: BASE[name] for name in ("up", "down")}, found)


def test_adapters_beside_other_types_are_refused(tmp_path):
    for frozen in ("int8", "nf4"):
        saved(tmp_path / f"{frozen}.safetensors", "*", frozen=frozen)
    pair = [read_adapter(tmp_path / f"{frozen}.safetensors") for frozen in ("int8", "nf4")]
    with pytest.raises(CheckpointError, match="int8 and nf4"):
        merge(BASE, *pair)


def test_a_file_of_other_tensors_is_no_adapter(tmp_path):
    write_safetensors(tmp_path / "x.safetensors", {"x": np.ones(3, np.float32)}, {})
    with pytest.raises(CheckpointError, match="save_adapter"):
        read_adapter(tmp_path / "x.safetensors")


def test_factor_zero_leaves_the_stored_base(tmp_path):
    saved(tmp_path / "x.safetensors", "down/*", frozen="nf4")
    found = read_adapter(tmp_path / "x.safetensors")
    got = merge(BASE, (dataclasses.replace(found), 0.0))
    apart = np.abs(np.asarray(got["down"]["kernel"] - BASE["down"]["kernel"])).max()
    assert 0 < apart < 0.2 * np.abs(np.asarray(BASE["down"]["kernel"])).max()
