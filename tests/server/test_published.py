"""Pulls of what has changed: the answers, the error feedback, the formula, and the bytes."""

import dataclasses

import jax
import numpy as np
import pytest
from comparison import bitwise, distance
from quick_study import write_study
from server_runs import host, server_setup, train_on_servers

from jtrain.parallel.strategies.compression import Int8
from jtrain.server.plan.server_plan import Plan
from jtrain.server.shards.codec import make_codec
from jtrain.server.shards.published import Publisher, Subscriber
from jtrain.server.threads import thread_cluster

CODEC = make_codec(Int8())
SGD = "optimizer={kind: sgd, lr: 0.3}"
CADENCE = ("evaluate.every=0", "checkpoint.every=0")
PULLS = "parallel.pulls=int8"


@pytest.fixture(scope="module")
def study(tmp_path_factory):
    return write_study(tmp_path_factory.mktemp("study"))


def draw(seed):
    generator = np.random.default_rng(seed)
    return [generator.standard_normal(shape).astype(np.float32) for shape in ((300,), (4, 5))]


def test_a_worker_that_misses_changes_gets_all_and_others_what_has_changed():
    publisher, regular, late = Publisher(CODEC), Subscriber(CODEC), Subscriber(CODEC)
    published, kinds = draw(0), []
    for update in range(4):
        if update:
            published = publisher.publish(draw(update), published)
        for worker in (regular,) if update in (1, 2) else (regular, late):
            answer = publisher.answer(worker.known(0), published)
            kinds.append(answer.kind)
            assert bitwise(worker.take(0, answer), published)
    assert kinds == ["all", "all", "change", "change", "change", "all"]
    answer = publisher.answer(regular.known(0), published)
    assert answer.kind == "nothing"
    assert bitwise(regular.take(0, answer), published)
    publisher.reset()
    assert publisher.answer(regular.known(0), published).kind == "all", "another state was loaded"


def test_what_a_change_leaves_out_is_in_the_next_one():
    """Each change leaves out at most 1/254 of a block's largest."""
    params, published = draw(1), draw(0)
    publisher, apart = Publisher(CODEC), []
    for _ in range(3):
        published = publisher.publish(params, published)
        apart.append(distance(published, params))
    assert apart[0] > 1e-3 > 1e-6 > apart[-1], apart


@pytest.mark.thorough
def test_diloco_with_changes_is_its_formula(study):
    """Four rounds of two workers: Q += C(P - Q) after the outer step of P, work begins at Q."""
    mode = "{kind: diloco, inner_steps: 2, lr: 0.5, momentum: 0.8}"
    setup = server_setup(study, mode, SGD, "steps=8", *CADENCE, PULLS, workers=2)
    served = train_on_servers(setup).state

    plain = server_setup(study, "{kind: sync}", SGD, "steps=8")  # for its step
    step = jax.jit(plain._step()[0])
    params, tree = jax.tree.flatten(host(plain.fresh().params))
    published, velocity = params, [np.zeros_like(leaf) for leaf in params]
    states = [plain.fresh(), plain.fresh()]
    shards = [plain.experiment.train.shard(worker, 2) for worker in range(2)]
    for first in range(0, 8, 2):
        begin = [dataclasses.replace(s, params=tree.unflatten(published)) for s in states]
        states = []
        for state, shard in zip(begin, shards, strict=True):
            for number in range(first, first + 2):
                state, _ = step(state, shard[number])
            states.append(state)
        ends = [jax.tree.leaves(host(state.params)) for state in states]
        change = [q - (a + b) / 2 for q, a, b in zip(published, *ends, strict=True)]
        velocity = [np.float32(0.8) * v + c for v, c in zip(velocity, change, strict=True)]
        outer = [np.float32(0.8) * v + c for v, c in zip(velocity, change, strict=True)]
        params = [p - np.float32(0.5) * u for p, u in zip(params, outer, strict=True)]
        rest = [p - q for p, q in zip(params, published, strict=True)]
        read = CODEC.decode(CODEC.encode(rest), rest)
        published = [q + r for q, r in zip(published, read, strict=True)]
    # A change in the middle between two levels may be rounded otherwise; its rest comes later.
    assert distance(served.params, tree.unflatten(params)) <= 1e-3
    assert distance(served.opt_state.outer.published, tree.unflatten(published)) <= 1e-2


@pytest.mark.thorough
def test_a_pull_has_the_bytes_of_the_format(study):
    """Two workers of a diloco of 20 rounds; frames without arrays are the same but for a few words.

    What int8 saves: 4 bytes less 1 and 4/256 a number, after the first pull.
    """
    mode, sizes = "{kind: diloco, inner_steps: 1}", []
    for pulls in ("exact", "int8"):
        values = "steps=21", *CADENCE, f"parallel.pulls={pulls}", "model.width=4096"
        setup = server_setup(study, mode, SGD, *values, workers=2)
        with thread_cluster(Plan(setup)) as (coordinator, _):
            coordinator.start(0, setup.fresh())
            done = 0
            while done < 21:
                done += len(coordinator.advance(21))
            sizes.append(coordinator.statistics()["worker_bytes"])
    numbers = sum(leaf.size for leaf in jax.tree.leaves(setup.like.params))
    saved = 2 * 20 * numbers * (4 - 1 - 4 / 256)
    assert abs((sizes[0] - sizes[1]) / saved - 1) < 0.01
