"""What does not suit parameter servers is refused before any process starts, with what to type."""

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest
from quick_study import config_of, write_study

import jtrain as jt
from jtrain.errors import ConfigError, LossError, UserError
from jtrain.parallel import Server
from jtrain.server.checks import check_plan
from jtrain.server.server_loop import coordinator_of, server_loop
from jtrain.server.server_plan import Plan
from jtrain.train.setup import set_up

DILOCO = "{kind: diloco, inner_steps: 4}"


@pytest.fixture(scope="module")
def study(tmp_path_factory):
    return write_study(tmp_path_factory.mktemp("study"))


def refusal(study, mode, *settings, workers=2, shards=1) -> str:
    """Return the words that refuse a config, and check that it is accepted without `settings`."""
    with pytest.raises(UserError) as found:
        plan(study, mode, *settings, workers=workers, shards=shards)
    return str(found.value)


def plan(study, mode, *settings, workers=2, shards=1) -> Plan:
    server = f"parallel={{kind: server, workers: {workers}, shards: {shards}, mode: {mode}}}"
    found = Plan(set_up(config_of(study, [server, "evaluate.every=0", *settings])))
    check_plan(found)
    return found


def test_rows_that_do_not_divide_into_the_workers(study):
    words = refusal(study, "{kind: sync}", workers=3)
    assert "16 rows do not divide into 3 workers" in words
    assert "batch=15" in words
    assert "parallel.mode.kind=async" in words
    plan(study, "{kind: sync}", "batch=15", workers=3)
    plan(study, "{kind: async}", workers=3)


def test_more_servers_than_rows(study):
    words = refusal(study, "{kind: async}", shards=30)
    advice = int(words.rpartition("Set parallel.shards=")[2].strip("."))
    assert 3 < advice < 19
    plan(study, "{kind: async}", shards=advice)


def test_checks_and_guards_that_need_every_state(study):
    assert "Set checks.recompute=0" in refusal(study, "{kind: sync}", "checks.recompute=4")
    assert "Set guard.kind=skip" in refusal(study, "{kind: sync}", "guard.kind=stop")
    plan(study, "{kind: sync}", "checks.recompute=0", "guard.kind=skip")


@pytest.mark.parametrize("key", ["evaluate.every", "checkpoint.every"])
def test_cadences_that_cut_a_round(study, key):
    words = refusal(study, DILOCO, "checkpoint.every=0", f"{key}=6")
    assert f"{key}=8" in words
    plan(study, DILOCO, "checkpoint.every=0", f"{key}=8")


def test_state_that_each_local_worker_would_have_of_its_own(study):
    values = DILOCO, "checkpoint.every=0"
    assert "precision.kind=bf16 or f32" in refusal(study, *values, "precision.kind=f16")
    assert "Set optimizer.ema=0" in refusal(study, *values, "optimizer.ema=0.9")
    plan(study, *values, "precision.kind=f32", "optimizer.ema=0")


def test_backups_with_two_terms(study):
    found = plan(study, "{kind: sync}")
    two = lambda params, batch, rng: (
        jt.Mean.of(batch["x"][:, 0] * params["bias"].sum(), batch["mask"])
        + 0.5 * jt.Mean.of(jnp.ones(len(batch["mask"])) * params["up"].sum(), batch["mask"])
    )
    experiment = dataclasses.replace(found.setup.experiment, loss=two)
    backed = plan(study, "{kind: sync, backups: 1}")
    with pytest.raises(ConfigError, match=r"2 terms.*parallel.mode.backups=0"):
        check_plan(Plan(dataclasses.replace(backed.setup, experiment=experiment)))
    check_plan(Plan(dataclasses.replace(found.setup, experiment=experiment)))


def test_rows_that_the_loss_couples(study):
    found = plan(study, "{kind: sync}")
    coupled = dataclasses.replace(found.setup.experiment, couples="batch")
    with pytest.raises(LossError, match="couples the rows of a batch"):
        _ = Plan(dataclasses.replace(found.setup, experiment=coupled)).programs
    whole = plan(study, "{kind: async}").setup
    assert Plan(dataclasses.replace(whole, experiment=coupled)).programs


def test_a_step_is_not_timed_before_the_run(study):
    setup = plan(study, "{kind: sync}").setup
    with pytest.raises(ConfigError, match="in steps, epochs or tokens"):
        setup.compile_step()(setup.like, {})


def test_a_run_without_a_directory(study):
    setup = plan(study, "{kind: sync}").setup
    with pytest.raises(ConfigError, match=r"type jtrain run CONFIG"):
        server_loop(None, setup.like, [], setup=setup, directory=None, log=print, start=0, stop=1)


def test_fit_has_no_servers():
    loss = lambda params, batch, rng: jt.Mean.of((batch["x"] - params["w"]) ** 2, batch["mask"])
    data = {"x": np.ones(8, np.float32)}
    with pytest.raises(ConfigError, match=r"type jtrain run CONFIG"):
        jt.fit(
            loss, {"w": jnp.float32(0)}, data, "sgd", lr=0.1, steps=2, batch=4, parallel=Server()
        )


def test_values_that_exclude_each_other(study):
    with pytest.raises(UserError, match=r"backups=2 of parallel.workers=2 .*At most 1"):
        plan(study, "{kind: sync, backups: 2}")
    with pytest.raises(UserError, match=r"engine=ray is not supported yet.*engine=local"):
        config_of(study, ["parallel={kind: server, engine: ray}"])
    assert config_of(study, ["parallel={kind: server, engine: local}"])


@pytest.mark.parametrize("mode", ["{kind: sync}", "{kind: async}"])
def test_nobody_is_late_before_the_run_begins(study, mode):
    found = plan(study, mode)
    assert coordinator_of(found)(found, []).silent() == []
