"""Lines that any thread logs reach the log in order, whoever sends them."""

import collections

from jtrain.io.lost_files import MessageBacklog


def test_lines_wait_for_a_log_and_keep_their_order():
    backlog, logged = MessageBacklog(), []
    backlog("one")
    backlog("two")
    backlog.send_to(logged.append)
    backlog("three")
    assert logged == ["one", "two", "three"]


def test_a_line_that_another_thread_sends_meanwhile_is_no_error():
    class Taken(collections.deque):
        """Lines of which another thread takes the last one between a look and the next call."""

        def __bool__(self) -> bool:
            return True

    backlog, logged = MessageBacklog(), []
    backlog._waiting = Taken(["one"])
    backlog.send_to(logged.append)
    assert logged == ["one"]
