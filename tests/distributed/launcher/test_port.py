"""Free ports: none that the kernel may give to another socket meanwhile, and none twice."""

import socket

from jtrain.distributed.launcher import port as ports
from jtrain.distributed.launcher.port import LOOPBACK, free_port


def test_a_free_port_is_none_that_the_kernel_gives_to_other_sockets(monkeypatch):
    found = [free_port() for _ in range(200)]
    assert len(set(found)) == 200
    assert max(found) < ports._lowest_ephemeral()
    monkeypatch.setattr(ports, "_lowest_ephemeral", lambda: 1024)  # it gives nearly all
    with socket.create_server((LOOPBACK, free_port())):
        pass


def test_a_port_at_which_a_program_listens_is_not_free(monkeypatch):
    taken, free = free_port(), free_port()
    monkeypatch.setattr(ports, "_given", set())
    drawn = iter([taken, taken, free])
    monkeypatch.setattr(ports.random.SystemRandom, "randint", lambda *_: next(drawn))
    with socket.create_server((LOOPBACK, taken)):
        assert free_port() == free
