"""Queue of scheduled functions: order, retries, errors and cancellations, without processes."""

import threading

import pytest

from jtrain.errors import PeerError
from jtrain.server.pool.items import CancelledError, Items, PendingErrors, RemoteError
from jtrain.server.transport.wire import Message


def taken(items: Items, worker: int):
    item = items.take(worker)
    assert item is not None
    return item.value


def add(items: Items, count: int = 1):
    return [
        items.add("f", lambda number: Message("call", {"item": number}), 0.0) for _ in range(count)
    ]


def test_items_are_taken_in_order_and_a_worker_has_one_at_a_time():
    items = Items(9)
    first, second = add(items, 2)
    assert taken(items, 0) is first
    assert taken(items, 0) is first, "asked again, after a lost connection"
    assert taken(items, 1) is second
    assert items.take(2) is None
    items.finish(0, 1, "one")
    assert (first.fetch(), first.done(), second.done()) == ("one", True, False)
    assert items.low == 1


def test_a_late_result_of_another_worker_is_ignored():
    items = Items(9)
    (value,) = add(items)
    items.take(0)
    items.put_back(0, "by SIGKILL")
    items.finish(0, 1, "late")
    assert not value.done()
    assert taken(items, 1) is value
    items.finish(1, 1, "once")
    items.finish(1, 1, "again")
    assert value.fetch() == "once"
    assert items.finished == 1


def test_the_item_of_a_dead_worker_comes_first_and_is_given_up_at_the_third_death():
    items = Items(9)
    first, second = add(items, 2)
    for death in range(3):
        assert taken(items, death) is first
        items.put_back(death, "by SIGSEGV")
    with pytest.raises(RemoteError, match=r"f \(item 1\) ended its worker 3 times.* by SIGSEGV"):
        first.fetch()
    with pytest.raises(CancelledError):
        second.fetch()
    (error,) = items.errors
    assert isinstance(error, RemoteError)
    assert error.item == 1
    assert items.is_idle


def test_an_error_cancels_what_waits_and_leaves_what_runs():
    items = Items(9)
    failing, running, waiting = add(items, 3)
    taken(items, 0)
    taken(items, 1)
    items.finish(0, 1, error=RemoteError("no", worker=0, item=1))
    assert not running.done()
    with pytest.raises(CancelledError, match=r"f \(item 3\) was cancelled"):
        waiting.fetch()
    with pytest.raises(PendingErrors):
        add(items)
    items.put_back(1, "by SIGKILL")
    with pytest.raises(CancelledError, match=r"f \(item 2\) was cancelled"):
        running.fetch()
    assert items.is_idle
    with pytest.raises(RemoteError):
        failing.fetch()


def test_a_full_queue_waits_for_room():
    items = Items(1)
    add(items)
    thread = threading.Thread(target=add, args=(items,))
    thread.start()
    thread.join(0.05)
    assert thread.is_alive()
    taken(items, 0)
    thread.join(10)
    assert not thread.is_alive()


def test_nothing_is_queued_after_a_fatal_error():
    items = Items(1)
    items.fatal = PeerError("no worker starts")
    with pytest.raises(PeerError, match="no worker starts"):
        add(items)
    assert items.is_idle


def test_low_is_the_number_up_to_which_all_have_ended():
    items = Items(9)
    add(items, 3)
    for worker in range(3):
        items.take(worker)
    lows = []
    for worker in (2, 0, 1):
        items.finish(worker, worker + 1)
        lows.append(items.low)
    assert lows == [0, 1, 3]


def test_fetch_has_a_timeout():
    (value,) = add(Items(9))
    with pytest.raises(TimeoutError, match=r"f \(item 1\) has no result in 0.01 s"):
        value.fetch(0.01)
    assert repr(value) == "RemoteValue(f, item 1, pending)"
