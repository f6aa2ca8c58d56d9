"""Registry of the servers: who has a place, and when it is free for one that stands by."""

from jtrain.server.engines.cluster_engine import Attached
from jtrain.server.processes.registry import Registry
from jtrain.server.transport.wire import Message


def ask(registry: Registry, name: str, port: int) -> str:
    reply = registry.handle(Message(name, {"shard": 0, "host": "node1", "port": port}))
    assert reply is not None
    return reply.name


def test_the_place_of_a_lost_server_is_free_once_its_loss_is_known():
    """A server that stands by asks twice a second; the run may save for minutes meanwhile."""
    registry = Registry(1)
    server = Attached(registry, 0)
    assert ask(registry, "register", 1) == "registered"
    assert ask(registry, "register", 1) == "registered", "asked again"
    assert ask(registry, "register", 2) == "taken"
    registry.lost(Message("watch", {"shard": 0, "host": "node1", "port": 1}))
    assert ask(registry, "register", 2) == "taken", "or nobody knows that it holds nothing"
    assert ask(registry, "watch", 1) == "end"
    assert server.end == "its connection broke"
    registry.forget(0)
    assert (ask(registry, "register", 2), server.end) == ("registered", "")
    registry.lost(Message("watch", {"shard": 0, "host": "node1", "port": 1}))
    assert registry.locate(0) == ("node1", 2), "of a connection that broke late"


def test_a_server_that_is_silent_ends_and_its_place_waits_too():
    registry = Registry(1)
    server = Attached(registry, 0)
    server.kill()
    assert server.end == "", "it is expected"
    ask(registry, "register", 1)
    server.kill()
    assert (server.end, ask(registry, "watch", 1)) == ("its connection broke", "end")
    assert ask(registry, "register", 2) == "taken"
