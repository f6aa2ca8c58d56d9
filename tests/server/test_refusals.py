"""What does not suit parameter servers is refused before any process starts, with what to type."""

import dataclasses
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest
from quick_study import config_of, write_study

import jtrain as jt
from jtrain.data import ShardedStream
from jtrain.errors import ConfigError, DataError, LossError, UserError
from jtrain.parallel import Server
from jtrain.server.plan.checks import check_plan
from jtrain.server.plan.server_plan import Plan
from jtrain.server.server_loop import coordinator_of, server_loop
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


def test_files_that_are_fewer_than_the_workers(study):
    files = [Path("a"), Path("b")]
    stream = lambda size: ShardedStream(files, open_nothing, dict, size=size, policy="file")
    fewer = plan(study, "{kind: sync}", workers=2)
    more = plan(study, "{kind: sync}", workers=4)
    whole = plan(study, "{kind: async}", workers=4)
    with pytest.raises(DataError, match=r"parallel.workers=4.*2 would read nothing.*kind=async"):
        check_plan(with_train(more, stream(16)))
    for fits in (fewer, whole):
        check_plan(with_train(fits, stream(16)))


class Nothing:
    def next(self):
        return {}

    def state(self):
        return {}

    def restore(self, state):
        del state


def open_nothing(files):
    del files
    return Nothing()


def with_train(found, train) -> Plan:
    experiment = dataclasses.replace(found.setup.experiment, train=train)
    return Plan(dataclasses.replace(found.setup, experiment=experiment))


def test_an_optimizer_that_evaluates_the_loss(study):
    words = refusal(study, "{kind: async}", "optimizer={kind: lbfgs}")
    assert "this optimizer evaluates the loss while it updates" in words
    assert "parallel.mode.kind=local_sgd" in words
    plan(study, "{kind: local_sgd, inner_steps: 1}", "optimizer={kind: lbfgs}")


def test_more_servers_than_rows(study):
    words = refusal(study, "{kind: async}", shards=30)
    advice = int(words.rpartition("Set parallel.shards=")[2].strip("."))
    assert 3 < advice < 19
    plan(study, "{kind: async}", shards=advice)


def test_checks_and_guards_that_need_every_state(study):
    assert "Set checks.recompute=0" in refusal(study, "{kind: sync}", "checks.recompute=4")
    assert "Set guard.kind=skip" in refusal(study, "{kind: sync}", "guard.kind=stop")
    plan(study, "{kind: sync}", "checks.recompute=0", "guard.kind=skip")


def test_threads_that_would_read_beside_the_workers(study):
    words = refusal(study, "{kind: sync}", "workers.count=2")
    assert "Set workers.count=0" in words
    plan(study, "{kind: sync}", "workers.count=0")


@pytest.mark.parametrize("key", ["evaluate.every", "checkpoint.every"])
def test_cadences_that_cut_a_round(study, key):
    words = refusal(study, DILOCO, "checkpoint.every=0", f"{key}=6")
    assert f"{key}=8" in words
    plan(study, DILOCO, "checkpoint.every=0", f"{key}=8")
    plan(study, STREAMING % (2, 1), "checkpoint.every=0", f"{key}=7")


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


def test_complex_parameters(study):
    found = plan(study, "{kind: sync}")
    like = dataclasses.replace(found.setup.like, params={"w": jnp.zeros(2, jnp.complex64)})
    with pytest.raises(ConfigError, match=r"w holds complex64.*parallel.kind=mirrored"):
        check_plan(Plan(dataclasses.replace(found.setup, like=like)))


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
    with pytest.raises(UserError, match=r"resources=.*CPU.* is of parallel.engine=ray.*Leave it"):
        config_of(study, ["parallel={kind: server, resources: 'CPU=1'}"])
    assert config_of(study, ["parallel={kind: server, engine: local}"])


STREAMING = "{kind: streaming_diloco, inner_steps: 6, fragments: %d, overlap: %d}"


def test_fragments_that_are_more_than_the_steps_or_overlap(study):
    words = refusal(study, STREAMING % (3, 2), "checkpoint.every=0")
    assert "3 fragments of 6 inner steps are pushed 2 steps apart" in words
    assert words.endswith("Set parallel.mode.overlap=1.")
    plan(study, STREAMING % (3, 1), "checkpoint.every=0")
    few = "{kind: streaming_diloco, inner_steps: 2, fragments: 3, overlap: 0}"
    words = refusal(study, few, "checkpoint.every=0")
    assert "parallel.mode.inner_steps=3, or parallel.mode.fragments=2" in words
    for settings in ("parallel.mode.inner_steps=3", "parallel.mode.fragments=2"):
        plan(study, few, "checkpoint.every=0", settings)
    words = refusal(study, few.replace("overlap: 0", "overlap: 1"), "checkpoint.every=0")
    assert "parallel.mode.inner_steps=6, or parallel.mode.fragments=1" in words
    words = refusal(study, STREAMING % (9, 0), "checkpoint.every=0")
    assert "Set parallel.mode.fragments=3." in words


def test_state_beside_the_parameters_of_fragments(study):
    found = plan(study, STREAMING % (2, 1), "checkpoint.every=0")
    setup = dataclasses.replace(found.setup)
    like = dataclasses.replace(setup.like, extra={"mean": jnp.zeros(3)})
    vars(setup)["like"] = like
    with pytest.raises(ConfigError, match=r"parallel.mode.kind=diloco\."):
        check_plan(Plan(setup))
    plan(study, "{kind: diloco, inner_steps: 6}", "checkpoint.every=0")


def test_rounded_numbers_where_the_mode_is_exact(study):
    more = "parallel={kind: server, mode: {kind: %s}, %s}"
    words = "takes the steps of one device.*parallel.%s, or parallel.mode.kind=%s"
    for value, repair, mode in (
        ("compress: {kind: int8}", "compress.kind=none", "async"),
        ("pulls: bf16", "pulls=exact", "async"),
        ("pulls: int8", "pulls=exact", "streaming_diloco"),
    ):
        with pytest.raises(UserError, match=words % (repair, mode)):
            config_of(study, [more % ("sync", value)])
        assert config_of(study, [more % ("sync", value), f"parallel.{repair}"])
        assert config_of(study, [more % (mode, value)])


def test_changes_are_pulled_only_where_workers_wait_for_each_other(study):
    more = "parallel={kind: server, pulls: int8, mode: {kind: %s}}"
    words = "others push between two of its pulls.*parallel.pulls=bf16, or .*=streaming_diloco"
    for mode in ("async", "async_diloco"):
        with pytest.raises(UserError, match=words):
            config_of(study, [more % mode])
        for repair in ("parallel.pulls=bf16", "parallel.mode={kind: streaming_diloco}"):
            assert config_of(study, [more % mode, repair])


def test_fewer_workers_than_shares_that_wait_for_all(study):
    server = "parallel={kind: server, workers: 4, max_workers: 3, mode: {kind: %s}}"
    with pytest.raises(UserError, match=r"streaming_diloco needs all 4 workers.*workers=3, or"):
        config_of(study, [server % "streaming_diloco"])
    for repair in ("parallel.workers=3", "parallel.max_workers=0"):
        assert config_of(study, [server % "streaming_diloco", repair])


def test_more_needed_workers_than_there_are(study):
    server = "parallel={kind: server, workers: 2, min_workers: 4, mode: {kind: %s}}"
    for mode, repair in (("sync", "parallel.workers=4"), ("async", "parallel.max_workers=4")):
        with pytest.raises(UserError, match=f"min_workers=2 at most, or {repair}"):
            config_of(study, [server % mode])
        assert config_of(study, [server % mode, repair])


def test_feedback_with_compensation(study):
    server = "parallel={kind: server, compress: {kind: int8}, mode: {kind: async, staleness: %s}}"
    compensate = server % "{kind: compensate}"
    with pytest.raises(UserError, match=r"compress.kind=bf16, or .*staleness.kind=scale"):
        config_of(study, [compensate])
    assert config_of(study, [server % "{kind: scale}"])
    assert config_of(study, [compensate.replace("int8", "bf16")])


@pytest.mark.parametrize("mode", ["{kind: sync}", "{kind: async}"])
def test_nobody_is_late_before_the_run_begins(study, mode):
    found = plan(study, mode)
    assert coordinator_of(found)(found, []).silent() == []
