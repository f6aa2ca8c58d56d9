"""Signals stop a run after its step: it saves and exits with 75, at once at a second one."""

import signal
import subprocess
import sys
import threading
import time

import counting
import pytest

from jtrain.core.loop import StoppedError
from jtrain.distributed import shutdown
from jtrain.train.hooks import Signals


def test_a_signal_that_nohup_ignores_stays_ignored():
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with Signals():
            assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, before)


def test_the_previous_handlers_are_restored(monkeypatch):
    monkeypatch.setattr(shutdown, "REPEATS", 3600.0)
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
                monkeypatch.setattr(shutdown, "REPEATS", 0.0)
                for number in before:
                    signal.raise_signal(number)
                assert called == list(before)
            assert [signal.getsignal(number) for number in before] == [mine, mine]
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def test_a_loop_that_reads_no_batches_of_its_own_is_stopped_too():
    with Signals() as signals:
        signals.check()
        signal.raise_signal(signal.SIGTERM)
        with pytest.raises(StoppedError, match="SIGTERM"):
            signals.check()


def test_in_another_thread_it_does_nothing():
    before, ended = signal.getsignal(signal.SIGINT), []

    def work():
        with Signals():
            ended.append(counting.run([], stop=3))
            ended.append(signal.getsignal(signal.SIGINT))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert ended[0].step == 3
    assert ended[1] == before


# A run that has steps to lose, and whose main thread is in C.
STUCK = """
import ctypes, signal, sys
from jtrain.train.hooks import Signals
from jtrain.core.loop import StoppedError
from jtrain.distributed import shutdown
from jtrain.distributed.heartbeat import HEARTBEAT
from jtrain.distributed.shutdown import exit_on_early_signals

shutdown.REPEATS = float(sys.argv[1])
exit_on_early_signals()
HEARTBEAT.beat("step", 5)
with Signals():
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})  # other threads take it
    print("now", flush=True)
    ctypes.CDLL(None).sleep(60)
"""


@pytest.mark.thorough
def test_a_second_signal_ends_at_once_what_is_stuck():
    process = subprocess.Popen(
        [sys.executable, "-c", STUCK, "3"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    assert process.stderr is not None
    try:
        assert process.stdout.readline() == "now\n"
        process.send_signal(signal.SIGTERM)
        assert process.stderr.readline() == "\n"
        assert "From 3 s on a second signal stops at once" in process.stderr.readline()
        process.send_signal(signal.SIGTERM)
        time.sleep(3.1)
        assert process.poll() is None, "that was the first one again"
        process.send_signal(signal.SIGTERM)
        assert process.wait(timeout=300) == 75
        assert "received a second signal (SIGTERM): exited at once" in process.stderr.read()
    finally:
        process.kill()
        process.communicate()
