"""Log ratios of a fresh sample, and faults of a sampler or a loss that they find."""

import functools
import os
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from quick_study import config_of
from tiny_configs import TINY

import jtrain as jt
from jtrain.errors import ConfigError
from jtrain.finetune import answers, group_policy
from jtrain.models import generate
from jtrain.models.generate import candidate_log_probs
from jtrain.parallel import FSDP, Mirrored

CONFIGS = Path(__file__).parents[2] / "configs"
SAMPLING = ("policy.temperature=0.7", "policy.top_k=8", "policy.top_p=0.8")
LORA = "lora={rank: 2, on: ['*kernel', tokens]}"


def config(*settings):
    return config_of(CONFIGS / "grpo.yaml", [*TINY["grpo"], "parallel={kind: single}", *settings])


def measure(*settings, **strategies):
    found = config(*SAMPLING, *settings)
    return jt.testing.assert_on_policy(found, strategies, rows=2)


@pytest.mark.thorough
@pytest.mark.parametrize("settings", [(), (LORA, "policy.beta=0.1")], ids=["whole", "lora"])
def test_the_loss_has_the_probabilities_of_the_sampler(settings):
    strategies = {
        "parts": FSDP(devices=2, min_size=0),
        "copies": Mirrored(devices=2, impl="shard_map"),
    }
    report = measure(*settings, **strategies)
    assert set(report.by_split) == {"one device", "2 microbatches", *strategies}
    assert 0 < report.largest < 1e-5


@pytest.mark.thorough
def test_without_a_cache_they_are_the_same_numbers():
    exact = "optimization_level=0" in os.environ["XLA_FLAGS"]  # else LLVM fuses multiply-adds
    assert measure("policy.cache=false").largest <= (0 if exact else 5e-7)


def unnormalized(logits, tokens, candidates=None):
    """Leave top_k and top_p out of the recorded probabilities."""
    del candidates
    return candidate_log_probs(logits, tokens)


FAULTS = {
    "a sampler that records probabilities before top_p": (
        generate, "candidate_log_probs", unnormalized,
    ),
    "a loss without top_p": (answers, "candidate_log_probs", unnormalized),
    "a loss of another temperature": (
        group_policy, "answer_log_probs",
        lambda *args, temperature: answers.answer_log_probs(*args, temperature=1.0),
    ),
}  # fmt: skip


@pytest.mark.thorough
@pytest.mark.parametrize("name", FAULTS)
def test_a_planted_fault_is_found(name, monkeypatch):
    module, function, fault = FAULTS[name]
    monkeypatch.setattr(module, function, fault)
    jax.clear_caches()  # of the sampler without the fault
    with pytest.raises(AssertionError, match=r"under one device the sampler drew token \d of ans"):
        measure()


def test_a_loss_that_does_not_sample_is_refused():
    additions = config_of(CONFIGS / "additions.yaml", [*TINY["additions"], "parallel.kind=single"])
    with pytest.raises(ConfigError, match="its loss does not sample"):
        jt.testing.assert_on_policy(additions)


def test_candidates_are_refused_where_a_later_step_needs_them():
    with pytest.raises(ConfigError, match=r"set policy.updates=1"):
        config("policy.updates=2", "policy.top_p=0.8")


def test_recorded_probabilities_are_of_the_candidates_alone():
    chances = jnp.array([[0.5, 0.3, 0.15, 0.05]])
    drawn = jax.jit(functools.partial(generate.draw, top_p=0.75))(
        jnp.log(chances), jax.random.split(jax.random.key(0), 1)
    )
    np.testing.assert_array_equal(drawn.candidates, [[True, True, False, False]])
    token = int(drawn.tokens[0])
    got = candidate_log_probs(drawn.logits, drawn.tokens, drawn.candidates)[0]
    assert abs(np.exp(got) - (0.5, 0.3)[token] / 0.8) < 1e-6
