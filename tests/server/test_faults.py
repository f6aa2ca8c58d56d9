"""What dies is started again: in threads, where a test says when."""

import threading

import pytest
from comparison import bitwise, distance
from server_runs import KillAt, Losses, host, server_setup, train_on_one_device, train_on_servers

from jtrain.errors import PeerError

pytestmark = pytest.mark.thorough
SGD = "optimizer={kind: sgd, lr: 0.1, momentum: 0.9}"


def test_a_lost_server_changes_nothing_in_sync(study):
    lines, kill = [], KillAt(7, "shard", 1)
    values = "steps=12", "parallel.snapshot_every=4", SGD, "evaluate.every=0"
    program = server_setup(study, "{kind: sync}", *values, workers=2, shards=2)
    got = train_on_servers(program, hooks=[kill], meddle=kill.meddle, log=lines.append)
    want = Losses()
    one = train_on_one_device(study, "steps=12", SGD, "evaluate.every=0", hooks=[want])
    assert distance(got.state.params, one.state.params) <= 1e-5
    assert [step for step, _ in kill.numbers] == list(range(1, 13)), "no step twice"
    assert "server 1 ended (SIGKILL), and is started again" in lines
    assert any("server 1 is restored from step 4" in line for line in lines)


def test_lost_updates_of_a_server_are_counted_under_async(study):
    lines, kill = [], KillAt(7, "shard", 0)
    values = "steps=30", "parallel.snapshot_every=5", SGD, "evaluate.every=0"
    program = server_setup(study, "{kind: async}", *values, workers=2, shards=2)
    got = train_on_servers(program, hooks=[kill], meddle=kill.meddle, log=lines.append)
    assert int(got.state.step) == 30
    assert [step for step, _ in kill.numbers] == list(range(1, 31))
    assert any("server 0 is restored from step 5: its updates since then" in line for line in lines)
    counted = [line for line in lines if "server 0 has lost" in line]
    assert len(counted) == 1
    assert 2 <= int(counted[0].split()[4]) <= 5, "those of steps 6 and 7, and what was in the air"


def test_a_process_that_dies_again_and_again_ends_the_run(study):
    program = server_setup(study, "{kind: sync}", "steps=3", SGD, workers=2, shards=1)

    def break_it(coordinator, supervisor):
        start = supervisor._engine.start

        def fail(role, index, environ):
            process = start(role, index, environ)
            if (role, index) == ("worker", 1):
                process.end, process.error = "exit code 70", "no such data\n"
            return process

        supervisor._engine.start = fail
        supervisor.processes["worker", 1].end = "exit code 70"

    with pytest.raises(PeerError, match=r"no such data\nworker 1 ended .*parallel.restarts=3"):
        # The other worker never ends a step alone, so that the run waits for this one.
        train_on_servers(program, meddle=break_it, environ={"JTRAIN_SERVER_SLOW": "0,1000"})


def test_backups_leave_out_the_slowest_and_divide_by_the_others(study):
    """With one of two workers slow, a step is that of the rows of the other."""
    mode = "{kind: sync, backups: 1}"
    program = server_setup(study, mode, "steps=3", SGD, "evaluate.every=0", workers=2)
    got = Losses()
    served = train_on_servers(program, hooks=[got], environ={"JTRAIN_SERVER_SLOW": "0,1000"})
    half = server_setup(study, "{kind: sync}", "steps=3", SGD, "evaluate.every=0", "batch=8")
    state, step = half.initial_state(), half._step(half.schedule)[0]
    rows = program.resolved.experiment.train.shard(0, 2)
    for number in range(3):
        state, metrics = step(state, rows[number])
        assert got.numbers[number][1]["loss"] == pytest.approx(metrics["loss"].value(), rel=1e-6)
    assert distance(served.state.params, state.params) <= 1e-6


def test_two_runs_are_equal_to_the_bit(study):
    before = threading.active_count()
    program = server_setup(study, "{kind: sync}", "steps=4", "batch=12", SGD, workers=3, shards=2)
    assert bitwise(host(train_on_servers(program).state), host(train_on_servers(program).state))
    assert threading.active_count() < before + 100
