"""Who worked for a run and when, from its workers.jsonl."""

import json

import pytest
from quick_study import write_study

from jtrain.cli import main
from jtrain.io.jsonl import JsonlWriter
from jtrain.server.coordination.attendance import FILE
from jtrain.server.coordination.members import Members


@pytest.fixture
def run(tmp_path, monkeypatch):
    """A run with the rows that the members of a coordinator write."""
    path = write_study(tmp_path)
    directory = tmp_path / "runs" / "quick"
    directory.mkdir(parents=True)
    (directory / "config.yaml").write_text(path.read_text())
    monkeypatch.chdir(tmp_path)
    rows = JsonlWriter(directory / FILE)
    members = Members(rows.append)
    members.reserved |= {0, 1}
    members.join({"process": 0, "host": "node1", "pid": 11}, 0)
    guest = members.join({"process": None, "host": "spot7", "pid": 77}, 5)
    guest.leases = 3
    members.leave(guest, "was asked to", 9)
    again = members.join({"process": None, "host": "spot8", "pid": 88}, 12)
    rows.close()
    assert (guest.worker, again.worker) == (2, 2), "a newcomer takes the number of one that left"
    assert members.find({"worker": 2, "key": guest.key}) is None
    return directory


def test_the_table_has_a_line_for_each_stay(run, capsys):
    assert main(["show", "quick", "--workers"]) == 0
    head, own, left, there = capsys.readouterr().out.splitlines()
    assert head.split() == ["worker", "host", "process", "joined", "steps", "leases", "left"]
    assert own.split()[:3] == ["0", "node1", "11"]
    assert left.split()[0:3] + left.split()[5:] == [
        "2",
        "spot7",
        "77",
        "5..9",
        "3",
        *["was", "asked", "to"],
    ]
    assert there.split()[5:] == ["12.."]
    assert main(["show", "quick", "--workers", "--json"]) == 0
    assert [stay["leases"] for stay in json.loads(capsys.readouterr().out)] == [None, 3, None]


def test_the_values_of_a_run_mention_its_workers(run, capsys):
    assert main(["show", f"{run}/config.yaml"]) == 0
    words = "3 workers joined this run, and 1 left it before its end: jtrain show"
    assert words in capsys.readouterr().err


def test_a_run_without_workers_says_so(run, capsys):
    (run / FILE).unlink()
    assert main(["show", "quick", "--workers"]) == 2
    assert "parallel.kind=server" in capsys.readouterr().err


def test_a_worker_with_a_new_connection_is_not_lost_with_the_old_one():
    """The end of the old one may be noticed while it computes for longer than it may be away."""
    members = Members()
    about = {"worker": members.join({"key": "a1"}, 0).worker, "key": "a1"}
    old, new = dict(about), dict(about)
    members.hear(old)
    members.hear(new)
    members.broken(old)
    assert members[0].broken is None
    members.broken(new)
    assert members[0].broken is not None
    members.broken(old)
    assert members.find(old) is members[0]
    assert members[0].broken is not None, "nothing new was heard"


def test_a_process_that_stands_by_takes_a_number_that_computes():
    members = Members(most=2)
    members.reserved |= {0, 1, 2}
    first, second, third = (members.join({"process": process}, 0) for process in range(3))
    assert [first.worker, second.worker, third.worker] == [0, 1, 2]
    members.leave(second, "was asked to", 3)
    members.reserved.discard(1)
    members.leave(third, "takes a place that is free", 3)
    assert members.join({"process": 2}, 3).worker == 1
    assert members.join({"process": 1}, 4).worker == 3, "the number is taken"
