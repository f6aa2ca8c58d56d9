import gc
import threading
import time
import traceback

import pytest

from jtrain.data import ReadAhead
from jtrain.errors import DataError

SLOW = 2e-3  # seconds a read, ten times the threshold


def slowly(step: int) -> int:
    time.sleep(SLOW)
    return step * step


def readers() -> int:
    return sum(thread.name == "read-ahead" for thread in threading.enumerate())


def soon(condition) -> bool:
    """Return whether the condition becomes true; a machine that is busy may take long."""
    until = time.monotonic() + 300
    while not condition() and time.monotonic() < until:
        time.sleep(0.002)
    return condition()


@pytest.fixture(autouse=True)
def no_thread_is_left():
    yield
    gc.collect()
    assert soon(lambda: readers() == 0)


@pytest.mark.parametrize("get", [slowly, lambda step: step * step], ids=["slow", "fast"])
def test_gives_every_step_once_in_order(get):
    with ReadAhead(get, start=3, stop=40) as ahead:
        assert list(ahead) == [step * step for step in range(3, 40)]
    assert list(ahead) == []


def test_fast_reads_stay_on_the_thread_of_the_loop():
    where = set()
    # The limit is a full second here, so that a busy machine cannot fail this test.
    with ReadAhead(
        lambda step: where.add(threading.get_ident()), start=0, stop=100, slow=1.0
    ) as ahead:
        list(ahead)
        assert not ahead.threaded
    assert where == {threading.get_ident()}


def test_slow_reads_move_to_a_thread():
    where = []
    with ReadAhead(
        lambda s: where.append(threading.get_ident()) or slowly(s), start=0, stop=30
    ) as a:
        taken = [next(a) for _ in range(20)]
        assert a.threaded
    assert taken == [step * step for step in range(20)]
    assert where[0] == threading.get_ident() != where[-1]


def test_reads_that_become_slow_move_to_a_thread():
    def get(step: int) -> int:
        return slowly(step) if step >= 20 else step

    with ReadAhead(get, start=0, stop=None) as ahead:
        for _ in range(40):
            next(ahead)
        assert ahead.threaded


def test_reads_that_become_quick_again_return_to_the_thread_of_the_loop():
    where = []

    def get(step: int) -> int:
        where.append(threading.get_ident())
        return slowly(step) if step < 10 else step * step

    # Nothing but `slowly` takes as long as this limit.
    with ReadAhead(get, start=0, stop=400, slow=0.9 * SLOW) as ahead:
        taken = list(ahead)
    assert taken == [step * step for step in range(400)]
    own = [thread == threading.get_ident() for thread in where]
    assert own[0]
    assert own[-1]
    assert not all(own)


def test_reads_while_the_loop_works():
    read = []

    def get(step: int) -> None:
        slowly(step)
        read.append(step)

    with ReadAhead(get, start=0, stop=60) as ahead:
        for _ in range(20):
            next(ahead)
        for taken in range(20, 40):  # a step that takes longer than a read
            assert soon(lambda taken=taken: len(read) > taken), "inline, it waits for the loop"
            next(ahead)


def test_counts_the_seconds_waited():
    with ReadAhead(slowly, start=0, stop=5) as ahead:
        began = time.perf_counter()
        list(ahead)
        assert 5 * SLOW <= ahead.waited <= time.perf_counter() - began


def test_never_prefetches_more_than_its_depth():
    read = []

    def get(step: int) -> None:
        slowly(step)
        read.append(step)

    with ReadAhead(get, start=0, stop=None, depth=3) as ahead:
        for _ in range(10):
            next(ahead)
        assert soon(lambda: len(read) == 13)
        time.sleep(5 * SLOW)
        assert len(read) == 13


@pytest.mark.parametrize("broken", [2, 30])
def test_an_error_is_raised_at_its_step_with_its_traceback(broken: int):
    error = OSError("the disk is gone")

    def get(step: int) -> int:
        if step == broken:
            raise error
        return slowly(step)

    ahead = ReadAhead(get, start=0, stop=40)
    for step in range(broken):
        assert next(ahead) == step * step
    with pytest.raises(OSError, match="the disk is gone") as caught:
        next(ahead)
    assert caught.value is error
    assert "raise error" in "".join(traceback.format_exception(caught.value))
    with pytest.raises(StopIteration):
        next(ahead)


def test_closing_stops_the_thread_at_once():
    begun = []

    def get(step: int) -> None:
        begun.append(step)
        slowly(step)

    ahead = ReadAhead(get, start=0, stop=None)
    for _ in range(12):
        next(ahead)
    assert readers() == 1
    ahead.close()
    before = len(begun)
    assert soon(lambda: readers() == 0)
    assert len(begun) == before, "no read begins any more"
    ahead.close()
    assert list(ahead) == []


def test_a_dropped_unfinished_iterator_ends_its_thread():
    ahead = ReadAhead(slowly, start=0, stop=None)
    for _ in range(12):
        next(ahead)
    assert readers() == 1
    del ahead
    gc.collect()
    assert soon(lambda: readers() == 0)


def test_an_error_in_the_loop_ends_the_thread():
    def loop() -> None:
        with ReadAhead(slowly, start=0, stop=None) as ahead:
            for step, _ in enumerate(ahead):
                assert step < 12, "the loop's own mistake"

    with pytest.raises(AssertionError, match="own mistake"):
        loop()
    assert soon(lambda: readers() == 0)


@pytest.mark.parametrize("slow", [0.0, 1.0], ids=["in a thread", "inline"])
def test_data_that_was_read_to_its_end_does_not_end_the_loop(slow: float):
    data = iter(range(12))
    with (
        ReadAhead(lambda step: next(data), start=0, stop=20, slow=slow) as ahead,
        pytest.raises(DataError, match=r"after step 12 raised StopIteration.* for fewer steps"),
    ):
        for _ in ahead:
            pass
