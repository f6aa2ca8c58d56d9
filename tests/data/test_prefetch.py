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
    assert where == {threading.get_ident()}


def test_an_error_is_raised_at_its_step_with_its_traceback():
    broken = 30
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


@pytest.mark.parametrize("slow", [0.0, 1.0])
def test_data_that_was_read_to_its_end_does_not_end_the_loop(slow: float):
    data = iter(range(12))
    with (
        ReadAhead(lambda step: next(data), start=0, stop=20, slow=slow) as ahead,
        pytest.raises(DataError, match=r"after step 12 raised StopIteration.* for fewer steps"),
    ):
        for _ in ahead:
            pass
