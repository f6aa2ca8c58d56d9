"""Shares of rows: each is computed once a round, stays with its worker, moves to an idle one."""

import random

import pytest

from jtrain.server.coordination.shares import Shares


def test_a_share_stays_with_its_worker_and_another_takes_the_rest():
    shares = Shares(3, keeps=True, step=0)
    assert [shares.lease(worker, []) for worker in (0, 1)] == [0, 1]
    assert shares.lease(0, []) == 0, "asked again"
    shares.report(0, 4)
    assert shares.lease(0, [0]) == 2
    assert shares.lease(1, [0]) == 1


def test_a_share_without_a_state_of_its_own_needs_a_worker_of_its_own():
    shares = Shares(2, keeps=False, step=0)
    assert shares.lease(0, []) == 0
    shares.report(0, 1)
    assert shares.lease(0, [0]) is None
    assert shares.lease(1, [0]) == 1
    assert shares.leave(1) == set()
    assert shares.lease(5, [0]) == 1


def test_a_state_is_lost_with_its_worker_unless_it_was_handed_over():
    shares = Shares(1, keeps=True, step=0)
    shares.lease(0, [])
    assert shares.leave(0) == set(), "the snapshot has the state"
    shares.lease(0, [])
    shares.report(0, 4)
    assert shares.behind() == [0]
    assert not shares.take_over(0, 1, 4), "another worker's"
    assert not shares.take_over(0, 0, 3), "an older one"
    assert shares.take_over(0, 0, 4)
    assert shares.behind() == []
    assert shares.leave(0) == set()
    shares.end_round()
    shares.lease(1, [])
    shares.report(0, 8)
    assert shares.leave(1) == {0}


def test_a_share_in_the_middle_of_a_round_goes_on_where_it_was_left():
    shares = Shares(1, keeps=True, step=0)
    shares.lease(0, [])
    shares.report(0, 4)
    shares.end_round()
    shares.lease(0, [])
    shares.keep_partial(0, 0, 6, ["state"])
    assert shares.leave(0) == set()
    assert shares.lease(3, []) == 0
    assert shares.partial(0) == (6, ["state"])
    assert shares.leave(3) == set(), "the next one dies, and the state is there still"
    shares.lease(4, [])
    shares.report(0, 8)
    assert shares.partial(0) is None


def test_a_newcomer_gets_a_share_of_the_worker_that_has_most():
    shares = Shares(3, keeps=True, step=0)
    for share in range(3):
        assert shares.lease(7, range(share)) == share
        shares.report(share, 4)
    assert shares.to_hand_over(7, False, [7]) == []
    assert shares.to_hand_over(7, False, [7, 8]) == [2]
    assert shares.lease(8, []) is None, "its state is not here yet"
    shares.end_round()
    shares.take_over(2, 7, 4)
    assert shares.to_hand_over(7, False, [7, 8]) == []
    assert shares.lease(8, []) == 2


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize("keeps", [True, False])
def test_every_share_is_computed_once_a_round_whoever_comes_and_goes(seed, keeps):
    draw = random.Random(seed)
    shares, step = Shares(4, keeps=keeps, step=0), 0
    present: set[int] = set(range(4))
    for _ in range(30):
        reported: dict[int, int] = {}
        for _ in range(10_000):
            if len(reported) == 4:
                break
            if draw.random() < 0.2:
                present.add(draw.randrange(7))
            if draw.random() < 0.2 and len(present) > (1 if keeps else 4):
                worker = draw.choice(sorted(present))
                for share in shares.to_hand_over(worker, True):
                    shares.take_over(share, worker, shares.step(share))
                if (current := shares.lease_of(worker)) is not None:
                    shares.keep_partial(current, worker, step + 2, [])
                assert shares.leave(worker) == set()
                present.discard(worker)
            worker = draw.choice(sorted(present))
            for share in shares.to_hand_over(worker, False, present):
                shares.take_over(share, worker, shares.step(share))
            share = shares.lease(worker, reported)
            if share is not None and draw.random() < 0.8:
                assert share not in reported
                reported[share] = worker
                shares.report(share, step + 5)
        assert len(reported) == 4
        shares.end_round()
        step += 5
