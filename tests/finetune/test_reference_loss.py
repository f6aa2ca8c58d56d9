"""The reference of a loss: the parameters before the first step, loaded and adapted ones too."""

import dataclasses
from pathlib import Path

import jax
import published_models as published
import pytest
from comparison import bitwise
from quick_study import config_of
from tiny_configs import TINY

import jtrain as jt
from jtrain.core.pytree import named_leaves
from jtrain.train.setup import set_up

CONFIG = Path(__file__).parents[2] / "configs" / "grpo.yaml"
TINY_GRPO = (*TINY["grpo"], "parallel={kind: single}", "policy.group=2", "policy.beta=0.3")
LORA = "lora={rank: 2, on: ['*kernel', tokens]}"


def setup_of(*settings):
    return set_up(config_of(CONFIG, [*TINY_GRPO, *settings]))


def step_of(setup):
    """Return a step, and its first batch."""
    x = setup.experiment
    return jt.make_step(x.loss, x.transformation), jax.tree.map(jax.numpy.asarray, x.train[0])


def test_the_reference_of_lora_is_a_copy_of_the_terms():
    setup = setup_of(LORA)
    assert set(setup.like.extra["rest"]) == {"steps", "rollouts", "reference"}
    reference = setup.like.extra["rest"]["reference"]
    assert jax.tree.structure(reference) == jax.tree.structure(setup.like.params)
    step, batch = step_of(setup)
    after, metrics = jax.eval_shape(step, setup.like, batch)
    assert jax.tree.structure(after) == jax.tree.structure(setup.like)
    assert "divergence" in metrics


@pytest.mark.thorough
def test_under_lora_the_policy_leaves_the_model_without_terms():
    setup = setup_of(LORA)
    step, batch = step_of(setup)
    step, first = jax.jit(step), setup.fresh()
    after, metrics = step(first, batch)
    assert metrics["divergence"].value() == 0
    assert bitwise(after.extra["rest"]["reference"], first.params)
    moved = dataclasses.replace(after, params=jax.tree.map(lambda x: x + 0.1, after.params))
    after, metrics = step(moved, batch)
    assert metrics["divergence"].value() > 0
    assert not bitwise(after.params, moved.params), "it is pulled back"
    assert bitwise(after.extra["rest"]["reference"], first.params)
    assert bitwise(after.extra["base"], first.extra["base"])


@pytest.mark.parametrize("lora", [False, True])
def test_a_loss_makes_its_state_from_loaded_weights(tmp_path, monkeypatch, lora):
    monkeypatch.chdir(tmp_path)
    golden = published.golden("llama31")
    published.write_model(tmp_path / "hf", golden)
    settings = ["model={from: hf}", *([LORA] if lora else [])]
    setup = set_up(config_of(CONFIG, [*TINY_GRPO, *settings]))
    state = setup.fresh()
    rest = state.extra["rest"] if lora else state.extra
    assert bitwise(rest["reference"], state.params)
    assert not rest["rollouts"]["answers"].any()
    loaded = named_leaves(state.extra["base"] if lora else state.params)
    assert setup.begins is not None
    assert set(setup.begins.loaded) == set(loaded)
