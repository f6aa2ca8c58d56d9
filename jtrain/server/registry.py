"""Registry of the servers' addresses, in the run's own process.

A server listens at a port that is free on its machine and reports its address; workers ask for it
at each connection. So a server that was started again may be on another machine.
"""

import threading
import time
from collections.abc import Callable
from typing import NamedTuple

from jtrain.errors import PeerError
from jtrain.server.client import Client
from jtrain.server.wire import Message

WATCH = 1.0  # seconds after which a watching server is told to ask again
SENDING = 0.1  # seconds for the last replies
STAND_BY = 0.5  # seconds between two attempts of a server whose place is taken


class Address(NamedTuple):
    """Address at which a process listens."""

    host: str
    port: int


class Registry:
    """Addresses by shard."""

    def __init__(self, shards: int):
        self._shards = shards
        self._changed = threading.Condition()
        self._addresses: dict[int, Address] = {}
        self._lost: set[int] = set()  # shards whose watch has ended, until `forget`
        self._ended, self._watching = False, 0

    def handle(self, request: Message) -> Message | None:
        """Answer a request that is about addresses; None if it is about something else."""
        if request.name not in {"register", "where", "watch"}:
            return None
        shard = request.fields["shard"]
        if not isinstance(shard, int) or not 0 <= shard < self._shards:
            raise ValueError(f"there is no server {shard!r}")
        if request.name == "where":
            found = self._addresses.get(shard)
            return Message("nowhere") if found is None else Message("there", found._asdict())
        address = Address(request.fields["host"], request.fields["port"])
        if request.name == "register":
            with self._changed:
                if self._ended:
                    return Message("end")
                # The place of a lost one is free once the supervisor knows that its state is gone.
                if shard in self._lost or self._addresses.get(shard, address) != address:
                    return Message("taken")
                self._addresses[shard] = address
                self._changed.notify_all()
            return Message("registered")
        over = lambda: self._ended or self._addresses.get(shard) != address
        with self._changed:
            self._watching += 1
            reply = Message("end" if self._changed.wait_for(over, WATCH) else "wait")
            self._watching -= 1
            self._changed.notify_all()
            return reply

    def locate(self, shard: int) -> Address:
        """Return the address of a shard.

        Raises:
            ConnectionError: if it has reported none yet.
        """
        found = self._addresses.get(shard)
        if found is None:
            raise ConnectionError(f"server {shard} has not reported its address")
        return found

    def is_lost(self, shard: int) -> bool:
        """Return whether a shard is gone that had reported its address."""
        return shard in self._lost

    def lose(self, shard: int) -> None:
        """Let the process of a shard end, and note that the shard is gone."""
        with self._changed:
            if self._addresses.pop(shard, None) is not None:
                self._lost.add(shard)
                self._changed.notify_all()

    def forget(self, shard: int) -> None:
        """Forget a shard that is gone: another process takes its place."""
        with self._changed:
            self._addresses.pop(shard, None)
            self._lost.discard(shard)
            self._changed.notify_all()

    def lost(self, request: Message) -> None:
        """Note that a shard is gone, since its watch has ended."""
        if request.name == "watch":
            shard = request.fields["shard"]
            with self._changed:
                if self._addresses.get(shard) == (request.fields["host"], request.fields["port"]):
                    self.lose(shard)

    def end(self) -> None:
        """Tell the servers that the run ends."""
        with self._changed:
            self._ended = True
            self._changed.notify_all()
            self._changed.wait_for(lambda: not self._watching, WATCH)
        time.sleep(SENDING)


def remote_locate(coordinator: Client, shard: int) -> Callable[[], tuple[str, int]]:
    """Return a function that asks the run's own process for the address of a shard."""

    def locate() -> tuple[str, int]:
        reply = coordinator.call(Message("where", {"shard": shard}))
        if reply.name != "there":
            raise ConnectionRefusedError(f"server {shard} has not reported its address")
        return reply.fields["host"], reply.fields["port"]

    return locate


def register(coordinator: Client, shard: int, address: Address) -> bool:
    """Report the address of a shard, once no other has its place; False if the run has ended."""
    request = Message("register", {"shard": shard, **address._asdict()})
    while (reply := coordinator.call(request)).name == "taken":
        time.sleep(STAND_BY)
    return reply.name == "registered"


def watch(coordinator: Client, shard: int, address: Address, patience: float) -> bool:
    """Return when the run has ended or has another server in this one's place.

    Returns:
        Whether the run said so; otherwise its process was not there for `patience` seconds.
    """
    request = Message("watch", {"shard": shard, **address._asdict()})
    last = time.monotonic()
    while True:
        try:
            if coordinator.call(request).name == "end":
                return True
            last = time.monotonic()
        except PeerError:
            if time.monotonic() > last + patience:
                return False
