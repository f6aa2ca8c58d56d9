"""Mode streaming_diloco: equal to diloco where it should be, and to its formula."""

import dataclasses

import jax
import numpy as np
import pytest
from comparison import bitwise, distance
from server_runs import KillAt, Losses, host, server_setup, train_on_servers

from benchmarks.server_threads import thread_cluster
from jtrain.errors import ConfigError
from jtrain.server.partition import FragmentSchedule, assign_fragments
from jtrain.server.plan import Plan
from jtrain.server.server_loop import take_steps

MOMENTUM = "optimizer={kind: sgd, lr: 0.1, momentum: 0.9}"
CADENCE = ("evaluate.every=0", "checkpoint.every=0")


def train(study, mode, *settings, **options):
    hooks = [Losses()]
    program = server_setup(study, mode, *settings, *CADENCE, **options)
    return train_on_servers(program, hooks=hooks).state, hooks[0].numbers


@pytest.mark.thorough
def test_one_fragment_without_overlap_is_diloco_to_the_bit(study):
    values, options = "inner_steps: 3, lr: 0.7, momentum: 0.9", {"workers": 2, "shards": 2}
    want, losses = train(study, f"{{kind: diloco, {values}}}", MOMENTUM, "steps=8", **options)
    mode = f"{{kind: streaming_diloco, {values}, fragments: 1, overlap: 0}}"
    got, numbers = train(study, mode, MOMENTUM, "steps=8", **options)
    assert bitwise(host(got.params), host(want.params))
    assert bitwise(host(got.opt_state.outer), host(want.opt_state.outer))
    assert bitwise(host(got.opt_state.inner.opt_state), host(want.opt_state.inner))
    assert numbers == losses


H, P, TAU, ALPHA, LR, BETA = 5, 2, 1, 0.25, 0.5, 0.8
STREAMING = (
    f"{{kind: streaming_diloco, inner_steps: {H}, fragments: {P}, overlap: {TAU}, "
    f"alpha: {ALPHA}, lr: {LR}, momentum: {BETA}}}"
)


@pytest.mark.thorough
def test_streaming_is_its_formula(study):
    """Twelve steps of two workers, against the paper's algorithm 2 written out here.

    Fragments are pushed after steps 2, 5, 7, 10 and, at the end, 12, when both are.
    """
    program = server_setup(study, STREAMING, MOMENTUM, "steps=12", *CADENCE, workers=2, shards=2)
    served = train_on_servers(program).state

    plain = server_setup(study, "{kind: sync}", MOMENTUM, "steps=12")  # for its step
    step = jax.jit(plain._step(plain.schedule)[0])
    fragment = assign_fragments(plain.resolved.abstract_state.params, P)
    assert set(fragment) == {0, 1}
    outer, tree = jax.tree.flatten(host(plain.initial_state().params))
    velocity = [np.zeros_like(leaf) for leaf in outer]
    states = [plain.initial_state(), plain.initial_state()]
    shards = [plain.resolved.experiment.train.shard(worker, 2) for worker in range(2)]
    for t in range(1, 13):
        states = [step(states[w], shards[w][t - 1])[0] for w in range(2)]
        own = [jax.tree.leaves(host(state.params)) for state in states]
        if t - TAU in (2, 5, 7, 10):
            merged = 0 if (t - TAU) % H == 2 else 1
            for leaves in own:
                for i, p in enumerate(fragment):
                    if p == merged:
                        leaves[i] = ALPHA * leaves[i] + (1 - ALPHA) * outer[i]
        pushed = {2: {0}, 7: {0}, 5: {1}, 10: {1}, 12: {0, 1}}.get(t, set())
        for i, p in enumerate(fragment):
            if p in pushed:
                change = outer[i] - (own[0][i] + own[1][i]) / 2
                velocity[i] = BETA * velocity[i] + change
                outer[i] = outer[i] - LR * (BETA * velocity[i] + change)
        states = [
            dataclasses.replace(state, params=tree.unflatten(leaves))
            for state, leaves in zip(states, own, strict=True)
        ]
    assert distance(served.params, tree.unflatten(outer)) <= 1e-6
    own = jax.tree.map(lambda *x: np.stack(x), *(state.params for state in states))
    assert distance(served.opt_state.inner.params, own) <= 1e-6


def test_fragments_are_strided_and_of_equal_bytes():
    layer = {"w": np.zeros((4, 4), np.float32)}
    params = {
        "blocks": {f"{i}": layer for i in range(7)},
        "out": np.zeros((8, 4)),
        "in": np.zeros(3),
    }
    assert assign_fragments(params, 3)[:7] == [0, 1, 2, 0, 1, 2, 0]
    assert assign_fragments(params, 0)[:7] == [0, 1, 2, 0, 1, 2, 0], "seven layers, three each"
    rest = dict(zip(("in", "out"), assign_fragments(params, 3)[7:], strict=True))
    assert rest == {"in": 2, "out": 1}, "first the larger, to the first of the smaller"
    few = {"a": np.zeros(3), "b": np.zeros(5)}
    assert set(assign_fragments(few, 0)) == {0}
    with pytest.raises(ConfigError, match=r"fragments=5: .* 2 leaves in 0 layers.*fragments=2"):
        assign_fragments(few, 5)
    assert set(assign_fragments(few, 2)) == {0, 1}


@pytest.mark.parametrize(
    ("overlap", "limits"), [(0, (3, 7, 12, 30)), (1, (30,)), (2, tuple(range(1, 31)))]
)
def test_the_schedule_is_the_same_wherever_the_state_is_read(overlap, limits):
    """Pushes after 3, 6 and 10 of each ten steps, merges `overlap` steps later, all at the end."""
    schedule = FragmentSchedule(inner_steps=10, fragments=3, overlap=overlap, stop=30)
    done, pushes, merges = 0, [], []
    for limit in limits:
        while done < limit:
            found = schedule.round_after(done, limit)
            assert found.first == done + 1
            if found.merge is not None:
                merges.append((found.merge_before - 1, found.merge))
            done = found.last
            pushes += [(done, fragment) for fragment in found.pushes]
    wanted = [(10 * k + at, p) for k in range(3) for p, at in enumerate([3, 6, 10])]
    assert pushes[:8] == wanted[:8]
    assert pushes[8:] == [(30, 0), (30, 1), (30, 2)]
    assert merges == [(at + overlap, p) for at, p in wanted if at + overlap < 30]


class Saved(Losses):
    """Hook that keeps a state."""

    every = 6

    def __init__(self):
        super().__init__()
        self.states = {}

    def on_state(self, step, state):
        self.states[step] = host(state)


@pytest.mark.thorough
@pytest.mark.parametrize("more", ["compress={kind: int4}", "pulls=int8"])
def test_a_run_goes_on_from_a_state_in_flight_to_the_bit(study, more):
    """Gates at steps 6 and 12, where a fragment is pushed and not merged, and then without."""
    values = MOMENTUM, "steps=14", *CADENCE, f"parallel.{more}"
    program = server_setup(study, STREAMING, *values, workers=2)
    assert program.resolved.config.parallel.mode.overlap == 1
    saved = Saved()
    whole = train_on_servers(program, hooks=[saved])
    plain = train_on_servers(program)
    assert bitwise(host(whole.state), host(plain.state)), "reading the state changes nothing"
    with thread_cluster(Plan(program)) as (coordinator, _):
        coordinator.start(6, saved.states[6])
        rest = take_steps(coordinator, saved.states[6], start=6, stop=14, hooks=())
    assert bitwise(host(rest.state), host(whole.state))


@pytest.mark.thorough
def test_a_lost_server_changes_nothing(study):
    lines, kill = [], KillAt(9, "shard", 1)
    values = "steps=14", "parallel.snapshot_every=5", MOMENTUM, *CADENCE, "parallel.pulls=int8"
    program = server_setup(study, STREAMING, *values, workers=2, shards=2)
    got = train_on_servers(program, hooks=[kill], meddle=kill.meddle, log=lines.append)
    want = train_on_servers(program)
    assert any("server 1 is restored from step 5" in line for line in lines)
    assert bitwise(host(got.state), host(want.state))
    assert [step for step, _ in kill.numbers] == list(range(1, 15)), "no step twice"


def test_a_fragment_in_flight_at_the_end_is_not_pushed_again():
    """Pushed after step 6 of 7 and merged before step 9: its change is in the servers already."""
    schedule = FragmentSchedule(inner_steps=9, fragments=3, overlap=2, stop=7)
    assert schedule.round_after(6, 7).pushes == (0, 2)
