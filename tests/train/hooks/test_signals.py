import os
import signal
import subprocess
import sys
import threading

import counting
import pytest
from plain_environ import plain_environ

from jtrain.distributed.heartbeat import shutdown_request
from jtrain.train.hooks import Signals, on_state

# Processes that get signals in their third step, and one more when they have stopped; each line
# says how one ended. Their clock is `now`: a process that gets no processor is late for nothing.
_SCRIPT = """
import functools, itertools, os, signal, warnings
from jtrain.train.hooks import Signals, signals as module
from jtrain.core.loop import train_loop
from jtrain.distributed.heartbeat import shutdown_request

shutdown_request.REPEATS = 0.2
now = 0.0
module.ShutdownRequest = functools.partial(shutdown_request.ShutdownRequest, lambda: now)

def life(number, pauses, late):
    global now

    def step(state, batch):
        global now
        for pause in pauses if state == 2 else ():
            now += pause
            os.kill(os.getpid(), number)
        return state + 1, {}

    with Signals() as signals:
        ended = train_loop(step, 0, itertools.repeat({}), start=0, stop=10, hooks=[signals])
    os.kill(os.getpid(), number)  # a repetition, after the block
    print(ended.step, ended.stop.why, end=", ", flush=True)
    if late:
        now += 0.3
        os.kill(os.getpid(), number)
        print("survived", end=", ", flush=True)

warnings.simplefilter("ignore")  # jax about fork; no thread of it runs yet
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's `&` may have it ignored
for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
    for pauses, late in (((0, 0, 0.05), False), ((0,), True), ((0, 0.3), False)):
        child = os.fork()
        if child == 0:
            try:
                life(number, pauses, late)
            except KeyboardInterrupt:
                print("KeyboardInterrupt", end=", ", flush=True)
            os._exit(0)
        print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
"""


@pytest.fixture(scope="module")
def lives():
    done = subprocess.run(
        [sys.executable, "-c", _SCRIPT],
        env={**os.environ, "JAX_PLATFORMS": "cpu"},
        capture_output=True,
        text=True,
        timeout=300,
        check=True,
    )
    for name in ("SIGINT", "SIGTERM", "SIGHUP"):
        warned = f"{name}: stopping after this step. From 0.2 s on a second signal stops at once"
        assert done.stderr.count(warned) == 3, "once each"
    return done.stdout.splitlines()


@pytest.mark.thorough
def test_signals_close_together_stop_the_loop_after_its_step(lives):
    assert lives[0] == "3 interrupted (Ctrl-C), 0"
    assert lives[3] == "3 asked to end (SIGTERM), 0"
    assert lives[6] == "3 asked to end (SIGHUP), 0"


@pytest.mark.thorough
def test_a_repeated_signal_is_ignored_also_after_the_handlers_are_restored(lives):
    assert lives[1] == "3 interrupted (Ctrl-C), KeyboardInterrupt, 0"
    assert lives[4] == f"3 asked to end (SIGTERM), {-signal.SIGTERM}"
    assert lives[7] == f"3 asked to end (SIGHUP), {-signal.SIGHUP}"


def test_a_second_signal_acts_at_once(lives):
    assert lives[2::3] == ["KeyboardInterrupt, 0", str(-signal.SIGTERM), str(-signal.SIGHUP)]


def test_a_second_signal_counts_two_seconds_after_the_warning():
    now = [0.0]
    request = shutdown_request.ShutdownRequest(clock=lambda: now[0])
    assert not request.repeats
    came = [request.signalled()]
    now[0] = 60.0  # whoever is to say the warning is held up
    came.append(request.signalled())
    request.warned()
    for now[0] in (60.0, 61.99, 62.0):
        came.append(request.signalled())
    assert came == ["first", "repeat", "repeat", "repeat", "second"]


def test_a_signal_that_nohup_ignores_stays_ignored():
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with Signals():
            assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, before)


def test_the_previous_handlers_are_restored(monkeypatch):
    monkeypatch.setattr(shutdown_request, "REPEATS", 3600.0)
    called = []
    mine = lambda number, frame: called.append(number)
    before = {number: signal.signal(number, mine) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        for raised in (False, True):
            with Signals() as signals:
                assert signal.getsignal(signal.SIGTERM) != mine
                if raised:
                    signal.raise_signal(signal.SIGTERM)
                    assert signals.why == "asked to end (SIGTERM)"
            if raised:  # what repeats it is not for those of before; what comes later is
                for number in before:
                    signal.raise_signal(number)
                assert called == []
                monkeypatch.setattr(shutdown_request, "REPEATS", 0.0)
                for number in before:
                    signal.raise_signal(number)
                assert called == list(before)
            assert [signal.getsignal(number) for number in before] == [mine, mine]
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def test_in_another_thread_it_does_nothing():
    before, ended = signal.getsignal(signal.SIGINT), []

    def work():
        with Signals() as signals:
            ended.append(counting.run([signals], stop=3))
            ended.append(signal.getsignal(signal.SIGINT))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert ended[0].step == 3
    assert ended[1] == before


def test_a_step_touches_no_handler(monkeypatch):
    touched, looks = [], []
    with Signals() as signals:
        monkeypatch.setattr(signal, "signal", lambda *_: touched.append("set"))
        ended = counting.run([signals, on_state(lambda step, state: looks.append(step))], stop=3)
        monkeypatch.undo()
    assert ended.stop is None
    assert (looks, touched) == ([1, 2, 3], [])


@pytest.mark.thorough
def test_devices_can_still_be_chosen_after_it_began():
    code = (
        "import jax; from jtrain.train.hooks import Signals\n"
        "with Signals(): jax.config.update('jax_num_cpu_devices', 3)\n"
        "assert jax.device_count() == 3"
    )
    env = plain_environ()
    subprocess.run([sys.executable, "-c", code], env=env, check=True, timeout=300)
