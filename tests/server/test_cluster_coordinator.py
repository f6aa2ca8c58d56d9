"""Cluster coordinator: functions in real processes, errors, deadlines, and kills."""
# ruff: noqa: E501  (a case reads best on a line)

import functools
import os
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import optax
import pool_functions as functions
import pytest
from comparison import assert_close

import jtrain as jt
from jtrain.errors import ConfigError, PeerError, ShardingError
from jtrain.server.pool import cluster_coordinator
from jtrain.server.pool.items import CancelledError, RemoteError
from jtrain.server.transport.wire import Message

PARAMS = {"w": np.zeros(8, np.float32), "b": np.float32(0)}
SGD = functools.partial(optax.sgd, 0.05)


@pytest.fixture(scope="module")
def coordinator():
    with jt.ClusterCoordinator(2) as found:
        yield found


def failures(coordinator) -> list[RemoteError]:
    with pytest.raises(ExceptionGroup) as raised:
        coordinator.join()
    found = [error for error in raised.value.exceptions if isinstance(error, RemoteError)]
    assert len(found) == len(raised.value.exceptions)
    return found


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def test_each_result_comes_once_and_in_its_place(coordinator):
    results = [coordinator.schedule(functions.square, (np.float32(i),)) for i in range(50)]
    coordinator.join()
    assert coordinator.done()
    assert [float(result.fetch()) for result in results] == [i * i for i in range(50)]
    named = coordinator.schedule("pool_functions:add", (1,), {"y": 2})
    assert coordinator.fetch({"a": [named, 5]}) == {"a": [{"sum": 3, "both": (1, 2)}, 5]}


def test_workers_are_processes_with_a_jax_of_their_own(coordinator):
    pids = {coordinator.schedule(functions.process_id).fetch() for _ in range(20)}
    assert pids <= set(coordinator.pids.values())
    assert os.getpid() not in pids
    assert coordinator.schedule(functions.devices).fetch()[0].lower().startswith(("tfrtcpu", "cpu"))


def test_join_raises_every_error_with_worker_and_item_and_nothing_runs(coordinator, tmp_path):
    scheduled, failed = tmp_path / "scheduled", tmp_path / "failed"
    slow = coordinator.schedule(functions.wait_for, (str(failed), 0.3, "x"))
    wrong = coordinator.schedule(functions.refuse_after, (str(scheduled), "cake"))
    waiting = [coordinator.schedule(functions.wait, (0.1, i)) for i in range(5)]
    scheduled.touch()
    with pytest.raises(RemoteError):
        wrong.fetch()
    failed.touch()
    (error,) = failures(coordinator)
    assert (error.kind, error.item, error.worker) == ("ValueError", wrong.number, error.worker)
    assert f"worker {error.worker}, item {error.item}: ValueError: no cake" in str(error)
    assert "pool_functions.py" in str(error), "the frames of the function"
    assert slow.fetch() == "x", "what was running has ended"
    with pytest.raises(RemoteError, match="no cake"):
        wrong.fetch()
    with pytest.raises(CancelledError, match=r"wait \(item \d+\) was cancelled"):
        waiting[-1].fetch()
    assert coordinator.schedule(functions.square, (3,)).fetch() == 9, "and more can be scheduled"
    coordinator.join()


@pytest.mark.thorough
def test_schedule_raises_the_errors_of_before(coordinator):
    wrong = coordinator.schedule(functions.refuse, ("tea",))
    with pytest.raises(RemoteError):
        wrong.fetch()
    with pytest.raises(ExceptionGroup, match="1 scheduled function failed"):
        coordinator.schedule(functions.square, (3,))
    coordinator.join()


def test_a_result_that_cannot_be_sent_is_an_error_of_its_function(coordinator):
    coordinator.schedule(functions.unsendable)
    (error,) = failures(coordinator)
    assert "the result of pool_functions:unsendable holds a builtins.object" in str(error)


@pytest.mark.thorough
def test_timeouts_of_join_and_fetch(coordinator, tmp_path):
    value = coordinator.schedule(functions.wait_for, (str(tmp_path / "over"), 0.0, 1))
    with pytest.raises(TimeoutError, match="functions are "):
        coordinator.join(timeout=0.05)
    with pytest.raises(TimeoutError, match=r"has no result in 0\.05 s"):
        coordinator.fetch(value, timeout=0.05)
    assert not coordinator.done()
    (tmp_path / "over").touch()
    coordinator.join()
    assert value.fetch() == 1


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"args": 3}, r"int was given: write schedule\(fn, \(x,\)\)"),
        ({"args": "xy"}, "str was given"),
        ({"args": (object(),)}, "an argument of pool_functions:square holds a builtins.object"),
        ({"deadline": -1}, "deadline=-1 is no number from 0 on"),
        ({"deadline": float("nan")}, "deadline=nan is no number"),
        ({"fn": lambda x: x}, "is a lambda"),
    ],
)
def test_wrong_arguments_are_refused_before_anything_is_sent(coordinator, given, says):
    with pytest.raises(ConfigError, match=says):
        coordinator.schedule(**{"fn": functions.square, **given})
    assert coordinator.done()


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"workers": 0}, "workers=0 is no number from 1 on"),
        ({"workers": True}, "workers=True is no number"),
        ({"workers": 1, "queue": 0}, "queue=0 is no number from 1 on"),
        ({"workers": 1, "deadline": "3"}, "deadline='3' is no number"),
    ],
)
def test_wrong_numbers_are_refused(given, says):
    with pytest.raises(ConfigError, match=says):
        jt.ClusterCoordinator(**given)


def test_outside_of_its_block_it_has_no_workers():
    coordinator = jt.ClusterCoordinator(1)
    with pytest.raises(ConfigError, match="in its `with` block only"):
        coordinator.schedule(functions.square, (3,))
    with pytest.raises(ConfigError, match="in its `with` block only"):
        jt.ParameterServers(PARAMS, SGD).pull()


def test_a_worker_that_asks_before_its_start_is_noted_is_no_stranger(monkeypatch):
    replies, threads = [], []

    def start(module, worker, **_):
        del module
        ask = Message("next", {"worker": worker, "pid": 4711})
        threads.append(threading.Thread(target=lambda: replies.append(coordinator._handle(ask))))
        threads[-1].start()
        threads[-1].join(0.2)
        return SimpleNamespace(pid=4711, end="", kill=lambda: None)

    monkeypatch.setattr(cluster_coordinator, "start_child", start)
    coordinator = jt.ClusterCoordinator(1)
    with coordinator:
        pass
    threads[0].join()
    assert [reply.name for reply in replies] == ["end"]


@pytest.mark.parametrize(
    ("given", "error", "says"),
    [
        ({"optimizer": optax.sgd(0.1)}, ConfigError, "write functools.partial"),
        ({"optimizer": lambda: optax.sgd(0.1)}, ConfigError, "is a lambda"),
        ({"params": {}}, ConfigError, "params has no array"),
        ({"params": {"w": optax.sgd}}, ConfigError, "dtype|array"),
        ({"shards": 0}, ConfigError, "shards=0 is no number from 1 on"),
        ({"shards": 40}, ConfigError, "Set shards=9"),
        pytest.param(
            *({"optimizer": functools.partial(optax.lamb, 0.1), "shards": 2}, ShardingError, "Set shards=1"),
            marks=pytest.mark.thorough,
        ),
    ],
)  # fmt: skip
def test_wrong_servers_are_refused_before_a_process_starts(given, error, says):
    with pytest.raises(error, match=says):
        jt.ParameterServers(**{"params": PARAMS, "optimizer": SGD, **given})


@pytest.fixture(scope="module")
def servers():
    with jt.ParameterServers(PARAMS, SGD, shards=2) as found:
        yield found


@pytest.mark.thorough
def test_pushes_are_steps_of_the_optimizer(servers):
    before = servers.pull()
    grads = {"w": np.arange(8, dtype=np.float32), "b": np.float32(2)}
    servers.push(grads)
    for name, leaf in servers.pull().items():
        assert_close(leaf, before[name] - np.float32(0.05) * grads[name], within=1e-6)


@pytest.mark.thorough
def test_a_gradient_of_another_shape_is_refused(servers):
    with pytest.raises(ConfigError, match="of the parameters' structure"):
        servers.push({"w": np.zeros(8, np.float32)})
    with pytest.raises(ConfigError, match=r"got \(3,\) for \(8,\)"):
        servers.push({"w": np.zeros(3, np.float32), "b": np.float32(1)})


@pytest.mark.thorough
def test_a_loop_by_hand_trains(coordinator, servers):
    losses = []
    for half in (range(75), range(75, 150)):
        losses += [coordinator.schedule(functions.train, (servers, seed)) for seed in half]
        coordinator.join()  # a gradient of the first parameters comes no later, whoever is slow
    found = coordinator.fetch(losses)
    assert found[-1] < 1e-2 * found[0]
    assert_close(servers.pull()["w"], functions.TARGET, within=0.2)


@pytest.mark.thorough
def test_a_push_of_a_function_that_runs_again_is_applied_once(coordinator, servers, tmp_path):
    before, updates, restarts = servers.pull(), servers.updates, coordinator.restarts
    coordinator.schedule(functions.push_and_die_once, (servers, str(tmp_path / "marker")))
    coordinator.join()
    assert coordinator.restarts == restarts + 1
    assert servers.updates == updates + 2, "its first push once, and its second"
    for name, leaf in servers.pull().items():
        assert_close(leaf, before[name] - np.float32(0.1), within=1e-5)
    coordinator.schedule(functions.push_infinity, (servers,))
    coordinator.join()
    for name, leaf in servers.pull().items():
        assert_close(leaf, before[name] - np.float32(0.1), within=1e-5)


@pytest.mark.thorough
def test_functions_of_killed_workers_run_again_and_results_come_once():
    lines = []
    with jt.ClusterCoordinator(2, log=lines.append) as coordinator:
        results = [coordinator.schedule(functions.wait, (0.05, i)) for i in range(40)]
        for kill in range(2):
            while sum(result.done() for result in results) < 10 * (kill + 1):
                time.sleep(0.01)
            os.kill(coordinator.pids[kill], signal.SIGKILL)
        coordinator.join()
        assert coordinator.fetch(results) == list(range(40))
        assert coordinator.restarts == 2
        assert lines[0] == "worker 0 is started again: SIGKILL"
        pids = list(coordinator.pids.values())
    assert not any(map(is_running, pids)), "nothing is left"


@pytest.mark.thorough
def test_a_function_that_ends_its_workers_is_given_up_and_one_that_is_slow(tmp_path):
    with jt.ClusterCoordinator(2, deadline=60) as coordinator:
        once = coordinator.schedule(functions.die_once, (str(tmp_path / "marker"), "x"))
        assert once.fetch() == "x"
        coordinator.schedule(functions.die)
        (error,) = failures(coordinator)
        assert "die (item 2) ended its worker 3 times, the last one by SIGKILL" in str(error)
        coordinator.schedule(functions.wait, (30, 0), deadline=0.2)
        (error,) = failures(coordinator)
        assert error.kind == "TimeoutError"
        assert "wait (item 3) did not end within its deadline of 0.2 s" in str(error)
        assert coordinator.restarts == 5
        assert coordinator.schedule(functions.square, (2,)).fetch() == 4


@pytest.mark.thorough
def test_an_exception_in_the_block_ends_all_at_once():
    found = {}

    def fail():
        with jt.ClusterCoordinator(1) as coordinator:
            found["value"] = coordinator.schedule(functions.wait, (600, 0))
            found["pids"] = list(coordinator.pids.values())
            raise KeyError

    with pytest.raises(KeyError):
        fail()
    with pytest.raises(CancelledError):
        found["value"].fetch()
    assert not any(map(is_running, found["pids"]))


@pytest.mark.thorough
def test_workers_that_cannot_start_end_with_their_output(monkeypatch, tmp_path):
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")
    monkeypatch.setenv("PYTHONPATH", "")
    broken, scheduled = tmp_path / "python", tmp_path / "scheduled"
    broken.write_text(f"#!/bin/sh\nuntil test -e {scheduled}; do sleep 0.01; done\nexit 1\n")
    broken.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(broken))
    with jt.ClusterCoordinator(1) as coordinator:
        value = coordinator.schedule(functions.square, (2,))
        scheduled.touch()
        with pytest.raises(PeerError, match=r"worker 0 ended \(exit code 1\) before it asked"):
            coordinator.join()
        with pytest.raises(CancelledError):
            value.fetch()
        with pytest.raises(PeerError, match="before it asked"):  # or its result never comes
            coordinator.schedule(functions.process_id)


@pytest.mark.thorough
def test_a_server_that_dies_is_named_and_the_state_goes_on_in_others():
    adam = functools.partial(optax.adam, 0.1)
    grads = {"w": np.ones(8, np.float32), "b": np.float32(1)}
    with jt.ParameterServers(PARAMS, adam, shards=2) as servers:
        servers.push(grads)
        params, opt_state = servers.state()
        servers.push(grads)
        expected = servers.pull()
        os.kill(servers.pids[1], signal.SIGKILL)
        with pytest.raises(PeerError, match=r"server 1 ended \(SIGKILL\).*opt_state=opt_state"):
            servers.pull()
    with jt.ParameterServers(params, adam, opt_state=opt_state) as servers:  # and one shard now
        servers.push(grads)
        assert_close(servers.pull()["w"], expected["w"], within=1e-6)


@pytest.mark.thorough
def test_a_script_schedules_its_own_functions(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(
        "import jtrain as jt\n"
        "def twice(x):\n"
        "    return 2 * x\n"
        "if __name__ == '__main__':\n"
        "    with jt.ClusterCoordinator(1) as coordinator:\n"
        "        print(coordinator.schedule(twice, (21,)).fetch())\n"
    )
    found = subprocess.run(
        [sys.executable, str(script)], capture_output=True, text=True, timeout=400, cwd=tmp_path
    )
    assert (found.returncode, found.stdout) == (0, "42\n"), found.stderr


def test_pushes_of_several_threads_are_all_applied():
    size, threads, pushes = 200_000, 4, 20
    ones = {"w": np.ones(size, np.float32)}
    with jt.ParameterServers({"w": np.zeros(size, np.float32)}, SGD) as servers:
        push = lambda _: [servers.push(ones) for _ in range(pushes)]
        with ThreadPoolExecutor(threads) as pool:
            list(pool.map(push, range(threads)))
        assert servers.updates == threads * pushes
