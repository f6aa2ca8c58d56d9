"""Parameter servers for a loop of one's own: `pull` parameters, `push` gradients.

Each server is a process with a part of the parameters and the optimizer's state for them. It
applies a push once, whoever sends it and however often: a push has the number of the scheduled
function that makes it, and its place among the pushes of that function.
"""

import contextlib
import json
import secrets
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from jtrain.core.pytree import norm
from jtrain.core.types import Params
from jtrain.distributed.launcher.port import claimed_port
from jtrain.errors import ConfigError, PeerError, ShardingError
from jtrain.server.engines.engine import LocalProcess
from jtrain.server.plan.checks import check_splits
from jtrain.server.pool.child import MOST, start_child
from jtrain.server.pool.values import decode, encode
from jtrain.server.shards.partition import make_partition
from jtrain.server.transport.client import Client, RefusedError, call_all
from jtrain.server.transport.wire import Message

START = 120.0  # seconds within which a server must have begun

Author = tuple[str, tuple[str, int]]  # who pushes, and which functions have ended by now
_author: Author | None = None
_pushes = 0
_outside = f"process-{uuid.uuid4().hex}"  # who pushes outside of a scheduled function
_outside_pushes = 0
_in_turn = threading.Lock()  # a server takes a number below its last one for a push sent again
_connected: dict[str, "ParameterServers"] = {}


@contextlib.contextmanager
def pushing_as(name: str, ended: tuple[str, int]) -> Iterator[None]:
    """Number the pushes in the block as those of a scheduled function.

    Args:
        ended: token of the coordinator, and the item up to which all have ended.
    """
    global _author, _pushes
    _author, _pushes = (name, ended), 0
    try:
        yield
    finally:
        _author = None


class ParameterServers:
    """Servers that hold parameters, in a `with` block; pass the object to scheduled functions.

    ```python
    optimizer = functools.partial(optax.sgd, 0.1)
    with jt.ParameterServers(params, optimizer, shards=2) as servers:
        with jt.ClusterCoordinator(workers=4) as coordinator:
            for step in range(100):
                coordinator.schedule(train_step, (servers, step))
        params = servers.pull()
    ```

    Args:
        params: tree of dicts, lists and tuples of arrays.
        optimizer: function that returns a transformation of optax, of a module or as a
            `functools.partial` of one; the servers call it.
        shards: number of processes, each with an equal part of the bytes.
        opt_state: state of the optimizer, as `state` returns it; None: a new one.
        timeout: seconds that an answer of a server may take.

    Raises:
        ConfigError: if the optimizer or the parameters cannot be sent.
        ShardingError: if the optimizer cannot be split.
    """

    def __init__(
        self,
        params: Params,
        optimizer: Callable[[], optax.GradientTransformation],
        *,
        shards: int = 1,
        opt_state: Any = None,
        timeout: float = 60.0,
    ):
        if not callable(optimizer) or isinstance(optimizer, optax.GradientTransformation):
            raise ConfigError(
                "optimizer is made in each server, and must be a function: write "
                "functools.partial(optax.sgd, 0.1) in the place of optax.sgd(0.1)."
            )
        if not isinstance(shards, int) or shards < 1:
            raise ConfigError(f"ParameterServers: shards={shards!r} is no number from 1 on.")
        self._params = jax.tree.map(np.asarray, params)
        self._optimizer = encode(optimizer, "the optimizer")[0]
        encode(self._params, "params")
        if not jax.tree.leaves(params):
            raise ConfigError("ParameterServers: params has no array.")
        self._opt_state, self._timeout = opt_state, timeout
        self._like = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), self._params)
        try:
            self._partition = make_partition(self._like, shards)
            if shards > 1:
                check_splits(optimizer(), self._like, self._partition)
        except (ConfigError, ShardingError) as error:
            raise type(error)(str(error).replace("parallel.shards", "shards")) from None
        self._rule = optimizer
        self._ports: list[int] = []
        self._token = secrets.token_hex(16)
        self._clients: list[Client] = []
        self._processes: list[LocalProcess] = []
        self._stack = contextlib.ExitStack()
        self._lock = threading.Lock()

    def __enter__(self) -> "ParameterServers":
        with contextlib.ExitStack() as stack:
            shards = range(len(self._partition.shards))
            self._ports = [stack.enter_context(claimed_port()) for _ in shards]
            for shard in shards:
                process = start_child(
                    "push_process", shard, port=self._ports[shard], token=self._token
                )
                stack.callback(process.kill)
                self._processes.append(process)
            self._connect()
            stack.callback(lambda: [client.close() for client in self._clients])
            self._load()
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()
        self._clients = []

    def pull(self) -> Params:
        """Return the parameters, on the host; each server's part is of one moment.

        Raises:
            PeerError: if a server has ended, or does not answer.
        """
        replies = self._call([Message("pull")] * len(self._ports))
        return self._partition.join(self._like, [reply.arrays for reply in replies])

    def push(self, grads: Params) -> None:
        """Let the servers take a step of the optimizer with a gradient, once.

        A gradient that is not finite is left out. The same push of a function that runs again,
        since its worker has died, changes nothing.

        Raises:
            ConfigError: if the gradient has another structure or shape than the parameters.
            PeerError: if a server has ended, or does not answer.
        """
        global _pushes, _outside_pushes
        grads = jax.tree.map(np.asarray, grads)
        self._check(grads)
        size = float(norm(jax.tree.map(jnp.asarray, grads)))
        parts = [self._partition.of_params(grads, i) for i in range(len(self._ports))]
        with _in_turn:
            if _author is not None:
                _pushes += 1
                fields = {"author": _author[0], "sequence": _pushes, "ended": list(_author[1])}
            else:
                _outside_pushes += 1
                fields = {"author": _outside, "sequence": _outside_pushes, "ended": []}
            fields |= {"norm": size if np.isfinite(size) else -1.0}
            self._call([Message("push", fields, jax.tree.leaves(part)) for part in parts])

    def state(self) -> tuple[Params, optax.OptState]:
        """Return parameters and optimizer state, with which other servers go on; no push at a time.

        Raises:
            PeerError: if a server has ended, or does not answer.
        """
        like = self._like, jax.eval_shape(self._rule().init, self._like)
        replies = self._call([Message("state")] * len(self._ports))
        return self._partition.join(like, [reply.arrays for reply in replies])

    @property
    def updates(self) -> int:
        """Number of pushes that were applied: of the server that has applied fewest."""
        replies = self._call([Message("updates")] * len(self._ports))
        return min(reply.fields["updates"] for reply in replies)

    @property
    def pids(self) -> Sequence[int]:
        """Process id of each server."""
        return [process.pid for process in self._processes]

    def to_plain(self) -> Mapping[str, Any]:
        """Return what another process connects by."""
        self._check_open()
        zeros = jax.tree.map(lambda x: [list(x.shape), x.dtype.name], self._like)
        return {
            "ports": self._ports,
            "token": self._token,
            "timeout": self._timeout,
            "optimizer": json.dumps(self._optimizer),
            "shapes": zeros,
        }

    @staticmethod
    def from_plain(found: Mapping[str, Any]) -> "ParameterServers":
        """Return the connection of this process to servers, made once."""
        token = found["token"]
        if token not in _connected:
            servers = ParameterServers.__new__(ParameterServers)
            is_leaf = lambda x: isinstance(x, list) and len(x) == 2 and isinstance(x[1], str)
            like = jax.tree.map(
                lambda x: jax.ShapeDtypeStruct(tuple(x[0]), x[1]), found["shapes"], is_leaf=is_leaf
            )
            servers._like, servers._token, servers._ports = like, token, list(found["ports"])
            servers._partition = make_partition(like, len(servers._ports))
            servers._optimizer = json.loads(found["optimizer"])
            servers._rule = decode(servers._optimizer, [])
            servers._timeout, servers._processes = found["timeout"], []
            servers._lock = threading.Lock()
            servers._connect()
            _connected[token] = servers
        return _connected[token]

    def _connect(self) -> None:
        options: dict[str, Any] = {"token": self._token, "most": MOST, "timeout": self._timeout}
        options["patience"] = min(self._timeout, 5.0)
        self._clients = [
            Client(f"server {shard}", port, **options) for shard, port in enumerate(self._ports)
        ]

    def _load(self) -> None:
        """Wait for the servers, and load the state into them."""
        opt_state = self._opt_state
        if opt_state is None:
            opt_state = jax.device_get(self._rule().init(self._params))
        end = time.monotonic() + START
        for shard, client in enumerate(self._clients):
            part = self._partition.of_state((self._params, opt_state), shard)
            arrays = [np.asarray(leaf) for leaf in jax.tree.leaves(part)]
            params = jax.tree.map(lambda x: None, self._like)
            fields = {"optimizer": self._optimizer, "tree": encode(params)[0]}
            while True:
                try:
                    client.call(Message("load", fields, arrays))
                    break
                except PeerError:
                    process = self._processes[shard]
                    if process.end or time.monotonic() > end:
                        raise PeerError(
                            f"{process.output()}server {shard} did not begin "
                            f"({process.end or 'no answer'}). Its output is above."
                        ) from None
                except RefusedError as error:
                    raise ConfigError(str(error)) from None

    def _check_open(self) -> None:
        if not self._clients:
            raise ConfigError(
                "ParameterServers has processes in its `with` block only: write "
                "`with jt.ParameterServers(params, optimizer) as servers:`."
            )

    def _check(self, grads: Params) -> None:
        if jax.tree.structure(grads) != jax.tree.structure(self._like):
            raise ConfigError(
                f"push takes a gradient of the parameters' structure, and got "
                f"{jax.tree.structure(grads)}; the parameters have "
                f"{jax.tree.structure(self._like)}."
            )
        for grad, like in zip(jax.tree.leaves(grads), jax.tree.leaves(self._like), strict=True):
            if grad.shape != like.shape:
                raise ConfigError(
                    f"push takes gradients of the parameters' shapes, and got {grad.shape} for "
                    f"{like.shape}."
                )

    def _call(self, requests: Sequence[Message]) -> Sequence[Message]:
        self._check_open()
        try:
            with self._lock:
                return call_all(self._clients, requests)
        except PeerError as error:
            ends = {i: process.end for i, process in enumerate(self._processes) if process.end}
            words = [f"server {i} ended ({end})" for i, end in ends.items()] or [str(error)]
            raise PeerError(
                f"{', '.join(words)}, and the parameters that it held are lost. Keep "
                f"servers.state() from time to time, and go on from it: "
                f"jt.ParameterServers(params, optimizer, opt_state=opt_state)."
            ) from None
