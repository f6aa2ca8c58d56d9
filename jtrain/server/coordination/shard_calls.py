"""Calls of the coordinator to the shards, and which of them were lost."""

import time
from collections.abc import Callable, Sequence
from typing import Any

from jtrain.errors import PeerError
from jtrain.server.transport.client import (
    AbsentError,
    Client,
    RefusedError,
    SilentError,
    call_all,
)
from jtrain.server.transport.wire import Message


class ShardsLostError(Exception):
    """State was lost with a process, so that the step begins again from the snapshot."""


class ShardCalls:
    """The shards of a run, which one thread calls.

    Args:
        clients: connections to them.
        supervise: called where one does not answer; it starts those that died again, and says by
            `lost` which.
        patience: seconds in which a shard that died has to be there again.
    """

    def __init__(self, clients: Sequence[Client], supervise: Callable[[], None], patience: float):
        self._clients, self._supervise, self._patience = clients, supervise, patience
        self.lost: set[int] = set()
        """Shards that were started again, and hold nothing."""
        self._silent: set[int] = set()

    def __len__(self) -> int:
        return len(self._clients)

    def check(self) -> None:
        """Raise if a shard was lost.

        Raises:
            ShardsLostError: if one was.
        """
        if self.lost:
            raise ShardsLostError

    def take_lost(self) -> list[int]:
        """Return the shards that were lost, and forget that they were."""
        lost, self.lost = sorted(self.lost), set()
        return lost

    def take_silent(self) -> set[int]:
        """Return the shards that did not answer, and forget that they did not."""
        silent, self._silent = self._silent, set()
        return silent

    def call_all(self, name: str, fields: dict[str, Any]) -> list[Message]:
        """Return the replies of all shards.

        Raises:
            ShardsLostError: if one died, and was started again.
            PeerError: if one does not come back.
            RefusedError: if one refuses.
        """
        return self._call(self._clients, [Message(name, fields)] * len(self._clients))

    def load(self, requests: dict[int, Message]) -> None:
        """Load some shards, until it succeeds; one of the others may be lost meanwhile."""
        clients = [self._clients[shard] for shard in requests]
        while True:
            try:
                self._call(clients, list(requests.values()))
                return
            except ShardsLostError:  # one that is loaded here, or else is restored later
                self.lost -= set(requests)

    def _call(self, clients: Sequence[Client], requests: Sequence[Message]) -> list[Message]:
        end = time.monotonic() + self._patience
        while True:
            try:
                return call_all(clients, requests)
            except (PeerError, RefusedError) as error:
                late = time.monotonic() > end
                if isinstance(error, SilentError) or (isinstance(error, AbsentError) and late):
                    self._silent.add(self._clients.index(error.client))
                self._supervise()
                self.check()
                if isinstance(error, RefusedError) or time.monotonic() > end:
                    raise
