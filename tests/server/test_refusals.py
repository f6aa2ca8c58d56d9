"""What does not suit parameter servers is refused before any process starts, with what to type."""

import dataclasses
from pathlib import Path

import jax.numpy as jnp
import pytest
from quick_study import config_of

import jtrain as jt
from jtrain.data import ShardedStream
from jtrain.errors import ConfigError, DataError, LossError, UserError
from jtrain.server.plan import Plan
from jtrain.server.plan_checks import check_plan
from jtrain.train.program import Program, set_up


def plan(study, mode, *settings, workers=2, shards=1) -> Plan:
    server = f"parallel={{kind: server, workers: {workers}, shards: {shards}, mode: {mode}}}"
    found = Plan(set_up(config_of(study, [server, "evaluate.every=0", *settings])))
    check_plan(found)
    return found


# A mode and settings that are refused, the advice, and what to type instead.
STREAMING = "{kind: streaming_diloco, inner_steps: 6, fragments: 3, overlap: %d}"
NO_SAVE = "checkpoint.every=0"
CASES = {
    "rows that do not divide": (("{kind: sync}", "parallel.workers=3"),
        "16 rows do not divide into 3 workers.*batch=15",
        [("{kind: sync}", "parallel.workers=3", "batch=15")]),
    "an optimizer that evaluates the loss": (("{kind: async}", "optimizer={kind: lbfgs}"),
        r"parallel\.mode\.kind=local_sgd",
        [("{kind: local_sgd, inner_steps: 1}", "optimizer={kind: lbfgs}")]),
    "a check that needs every state": (("{kind: sync}", "checks.recompute=4"),
        "Set checks.recompute=0", [("{kind: sync}", "checks.recompute=0")]),
    "a guard that needs every state": (("{kind: sync}", "guard.kind=stop"), "Set guard.kind=skip",
        [("{kind: sync}", "guard.kind=skip")]),
    "a cadence that cuts a round": (("{kind: diloco, inner_steps: 4}", NO_SAVE, "evaluate.every=6"),
        "evaluate.every=8", [("{kind: diloco, inner_steps: 4}", NO_SAVE, "evaluate.every=8")]),
    "a scale of its own for each worker": (("{kind: diloco, inner_steps: 4}", NO_SAVE,
        "precision.kind=f16"), "precision.kind=bf16 or f32",
        [("{kind: diloco, inner_steps: 4}", NO_SAVE, "precision.kind=f32")]),
    "an average of its own for each worker": (("{kind: diloco, inner_steps: 4}", NO_SAVE,
        "optimizer.ema=0.9"), "Set optimizer.ema=0",
        [("{kind: diloco, inner_steps: 4}", NO_SAVE, "optimizer.ema=0")]),
    "fragments that overlap": ((STREAMING % 2, NO_SAVE), r"Set parallel\.mode\.overlap=1\.",
        [(STREAMING % 1, NO_SAVE)]),
    "rounded pushes where the mode is exact": (("{kind: sync}", "parallel.compress={kind: int8}"),
        "takes the steps of one device.*parallel.compress.kind=none, or parallel.mode.kind=async",
        [("{kind: sync}",), ("{kind: async}", "parallel.compress={kind: int8}")]),
    "changes where others push between two pulls": (("{kind: async}", "parallel.pulls=int8"),
        "others push between two of its pulls.*parallel.pulls=bf16, or .*=streaming_diloco",
        [("{kind: async}", "parallel.pulls=bf16"),
        (STREAMING % 1, NO_SAVE, "parallel.pulls=int8")]),
    "feedback with compensation": (("{kind: async, staleness: {kind: compensate}}",
        "parallel.compress={kind: int8}"), r"compress.kind=bf16, or .*staleness.kind=scale",
        [("{kind: async, staleness: {kind: scale}}", "parallel.compress={kind: int8}")]),
}  # fmt: skip


@pytest.mark.thorough
@pytest.mark.parametrize("name", CASES)
def test_is_refused_and_what_the_message_says_is_accepted(study, name):
    refused, words, repairs = CASES[name]
    with pytest.raises(UserError, match=f"(?s){words}"):
        plan(study, *refused)
    for repair in repairs:
        plan(study, *repair)


def test_files_that_are_fewer_than_the_workers(study):
    files = [Path("a"), Path("b")]
    empty = lambda files: Nothing()
    stream = lambda size: ShardedStream(files, empty, dict, size=size, policy="file")
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


def _with(found: Plan, **changes) -> Plan:
    """Return the plan of a run with other values."""
    return Plan(Program(dataclasses.replace(found.program.resolved, **changes)))


def with_train(found, train) -> Plan:
    experiment = dataclasses.replace(found.program.resolved.experiment, train=train)
    return _with(found, experiment=experiment)


def test_backups_with_two_terms(study):
    found = plan(study, "{kind: sync}")
    two = lambda params, batch, rng: (
        jt.Mean.of(batch["x"][:, 0] * params["bias"].sum(), batch["mask"])
        + 0.5 * jt.Mean.of(jnp.ones(len(batch["mask"])) * params["up"].sum(), batch["mask"])
    )
    experiment = dataclasses.replace(found.program.resolved.experiment, loss=two)
    backed = plan(study, "{kind: sync, backups: 1}")
    with pytest.raises(ConfigError, match=r"2 terms.*parallel.mode.backups=0"):
        check_plan(_with(backed, experiment=experiment))
    check_plan(_with(found, experiment=experiment))


def test_complex_parameters(study):
    found = plan(study, "{kind: sync}")
    state = dataclasses.replace(
        found.program.resolved.abstract_state, params={"w": jnp.zeros(2, jnp.complex64)}
    )
    with pytest.raises(ConfigError, match=r"w holds complex64.*parallel.kind=mirrored"):
        check_plan(_with(found, abstract_state=state))


def test_rows_that_the_loss_couples(study):
    found = plan(study, "{kind: sync}")
    coupled = dataclasses.replace(found.program.resolved.experiment, rows_interact="batch")
    with pytest.raises(LossError, match="couples the rows of a batch"):
        _ = _with(found, experiment=coupled).programs
    whole = plan(study, "{kind: async}")
    assert _with(whole, experiment=coupled).programs
