"""A task in a thread returns its error to whoever waits, however late its thread begins."""

import time

import pytest

from jtrain.checkpoint import thread_task
from jtrain.checkpoint.thread_task import ThreadTask


class Late(ThreadTask):
    """Task whose thread gets no processor for a while."""

    def _run(self) -> None:
        time.sleep(0.1)
        super()._run()


def test_a_thread_that_is_slow_to_begin_is_waited_for(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(thread_task, "_START_TIMEOUT", 0.0)
    error = OSError("the disk is full")

    def fail() -> None:
        raise error

    task = Late(fail)
    task.start()
    assert task.wait() is error
    assert task.ended()


def test_a_task_that_never_began_has_no_error():
    assert ThreadTask(lambda: None).wait() is None
