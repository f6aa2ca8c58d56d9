import os
import signal
import subprocess
import sys
import threading

import counting
import pytest

from jtrain.hooks import Signals, on_state

# Processes that get a signal, once or twice, in their third step; each line says how one ended.
_SCRIPT = """
import itertools, os, signal, warnings
from jtrain.hooks import Signals
from jtrain.loop import train

def life(number, times):
    def step(state, batch):
        for _ in range(times if state == 2 else 0):
            os.kill(os.getpid(), number)
        return state + 1, {}

    with Signals() as signals:
        ended = train(step, 0, itertools.repeat({}), start=0, stop=10, hooks=[signals])
    print(ended.step, ended.stop.why, ended.stop.kind, flush=True)

warnings.simplefilter("ignore")  # jax about fork; no thread of it runs yet
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's `&` may have it ignored
for number in (signal.SIGINT, signal.SIGTERM):
    for times in (1, 2):
        child = os.fork()
        if child == 0:
            try:
                life(number, times)
            except KeyboardInterrupt:
                print("KeyboardInterrupt", flush=True)
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
        timeout=60,
        check=True,
    )
    assert done.stderr.count("once more to stop at once") == 4
    return done.stdout.splitlines()


def test_a_signal_stops_the_loop_after_its_step(lives):
    assert lives[:2] == ["3 interrupted (Ctrl-C) interrupted", "0"]
    assert lives[4:6] == ["3 asked to end (SIGTERM) interrupted", "0"]


def test_the_second_signal_acts_at_once(lives):
    assert lives[2:4] == ["KeyboardInterrupt", "0"]
    assert lives[6:] == [str(-signal.SIGTERM)]


def test_the_handlers_of_before_are_put_back():
    mine = lambda number, frame: None
    before = {number: signal.signal(number, mine) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        for raised in (False, True):
            with Signals() as signals:
                assert signal.getsignal(signal.SIGTERM) != mine
                if raised:
                    signal.raise_signal(signal.SIGTERM)
                    assert signals.why == "asked to end (SIGTERM)"
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


def test_devices_can_still_be_chosen_after_it_began():
    code = (
        "import jax; from jtrain.hooks import Signals\n"
        "with Signals(): jax.config.update('jax_num_cpu_devices', 3)\n"
        "assert jax.device_count() == 3"
    )
    env = {name: value for name, value in os.environ.items() if name != "XLA_FLAGS"}
    subprocess.run([sys.executable, "-c", code], env=env, check=True, timeout=100)
