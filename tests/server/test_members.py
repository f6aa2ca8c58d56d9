"""Who works for a run: workers and their shares of the rows, and the places of servers."""

import random

import pytest
from quick_study import write_study

from jtrain.cli import main
from jtrain.io.jsonl import JsonlWriter
from jtrain.server.engines import Attached
from jtrain.server.listener import Registry
from jtrain.server.members import FILE, Members
from jtrain.server.shares import Shares
from jtrain.server.wire import Message


def test_a_state_is_lost_with_its_worker_unless_it_was_handed_over():
    shares = Shares(1, stateful=True, step=0)
    shares.lease(0, [])
    assert shares.leave(0) == set(), "the snapshot has the state"
    shares.lease(0, [])
    shares.report(0, 4)
    assert shares.unsaved() == [0]
    shares.take_over(0, 1, 4)  # another worker's
    shares.take_over(0, 0, 3)  # an older one
    assert shares.unsaved() == [0]
    shares.take_over(0, 0, 4)
    assert shares.unsaved() == []
    assert shares.leave(0) == set()
    shares.end_leases()
    shares.lease(1, [])
    shares.report(0, 8)
    assert shares.leave(1) == {0}


def test_a_share_whose_worker_leaves_in_the_middle_of_a_round_is_computed_again():
    shares = Shares(1, stateful=True, step=0)
    shares.lease(0, [])
    shares.report(0, 4)
    shares.end_leases()
    shares.lease(0, [])
    assert shares.to_hand_over(0, True) == [], "it computes"
    shares.end_leases(0)
    assert shares.to_hand_over(0, True) == [0]
    shares.take_over(0, 0, 4)
    assert shares.leave(0) == set()
    assert shares.lease(3, []) == 0


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("stateful", [True, False])
def test_every_share_is_computed_once_a_round_whoever_comes_and_goes(seed, stateful):
    draw = random.Random(seed)
    shares, step = Shares(4, stateful=stateful, step=0), 0
    present: set[int] = set(range(4))
    for _ in range(30):
        reported: dict[int, int] = {}
        for _ in range(10_000):
            if len(reported) == 4:
                break
            if draw.random() < 0.2:
                present.add(draw.randrange(7))
            if draw.random() < 0.2 and len(present) > (1 if stateful else 4):
                worker = draw.choice(sorted(present))
                shares.end_leases(worker)
                for share in shares.to_hand_over(worker, True):
                    shares.take_over(share, worker, shares.all[share].step)
                assert shares.leave(worker) == set()
                present.discard(worker)
            worker = draw.choice(sorted(present))
            for share in shares.to_hand_over(worker, False, present):
                shares.take_over(share, worker, shares.all[share].step)
            share = shares.lease(worker, reported)
            if share is not None and draw.random() < 0.8:
                assert share not in reported
                reported[share] = worker
                shares.report(share, step + 5)
        assert len(reported) == 4
        shares.end_leases()
        step += 5


def test_each_stay_of_a_worker_is_a_row_and_a_number_is_used_again(tmp_path, monkeypatch, capsys):
    path = write_study(tmp_path)
    directory = tmp_path / "runs" / "quick"
    directory.mkdir(parents=True)
    (directory / "config.yaml").write_text(path.read_text())
    monkeypatch.chdir(tmp_path)
    rows = JsonlWriter(directory / FILE)
    members = Members(rows.append)
    members.join({"process": 0, "host": "node1", "pid": 11, "key": "a"}, 0)
    guest = members.join({"process": None, "host": "spot7", "pid": 77, "key": "b"}, 5)
    guest.leases = 3
    members.leave(guest, "was asked to", 9)
    again = members.join({"process": None, "host": "spot8", "pid": 88, "key": "c"}, 12)
    rows.close()
    assert (guest.worker, again.worker) == (1, 1)
    assert members.find({"key": guest.key}) is None
    assert main(["show", "quick", "--workers"]) == 0
    _, own, left, there = map(str.split, capsys.readouterr().out.splitlines())
    assert own[:3] == ["0", "node1", "11"]
    assert left[:3] + left[5:] == ["1", "spot7", "77", "5..9", "3", "was", "asked", "to"]
    assert there[5:] == ["12.."]


def test_a_worker_with_a_new_connection_is_not_lost_with_the_old_one():
    """The end of the old one may be noticed while it computes for longer than it may be away."""
    members = Members()
    old, new = {"key": "a1"}, {"key": "a1"}
    member = members.join(old, 0)
    member.hear(new)
    members.lose(old)
    assert not member.broken
    members.lose(new)
    assert member.broken
    assert members.find(old) is member


def test_a_process_that_stands_by_takes_a_number_that_computes():
    members = Members(most=2)
    first, second, third = (members.join({"process": p, "key": f"{p}"}, 0) for p in range(3))
    assert [first.worker, second.worker, third.worker] == [0, 1, 2]
    members.leave(second, "was asked to", 3)
    members.leave(third, "takes a place that is free", 3)
    assert members.join({"process": 2, "key": "2b"}, 3).worker == 1
    assert members.join({"process": 1, "key": "1b"}, 4).worker == 2, "the number is taken"


def ask(registry: Registry, name: str, port: int) -> str:
    reply = registry.handle(Message(name, {"shard": 0, "host": "node1", "port": port}))
    assert reply is not None
    return reply.name


def test_a_server_that_is_started_again_takes_the_place_of_the_one_before():
    registry = Registry(1)
    server = Attached(registry, 0)
    assert ask(registry, "register", 1) == "registered"
    assert ask(registry, "register", 1) == "registered", "asked again"
    assert server.end == ""
    assert ask(registry, "register", 2) == "registered"
    assert ask(registry, "watch", 1) == "end"
    assert server.end == "its place was taken"
    assert registry.locate(0) == ("node1", 2)
    again = Attached(registry, 0)
    assert again.end == ""
    again.kill()
    assert ask(registry, "watch", 2) == "end"
    assert again.end == "its place was taken"
