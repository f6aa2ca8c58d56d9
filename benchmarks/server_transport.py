"""Bytes and updates a second of a parameter server on the loopback, beside a bare socket copy.

    python benchmarks/server_transport.py

A worker pushes a gradient and pulls the parameters, 100 MB each way, from one server or two; bare
sockets copy as many bytes between the same processes. Pairs are interleaved, the medians compared.
"""

import argparse
import multiprocessing
import os
import secrets
import socket
import statistics
import time

import jax
import numpy as np
import optax

from jtrain.server.client import Client, call_all, closing
from jtrain.server.listener import LOOPBACK, Listener
from jtrain.server.shard import Facts, Shard
from jtrain.server.wire import Message, with_huge_pages

GOOD = Facts(finite=True, value=1.0, grad_norm=1.0)


def hold(port: multiprocessing.Queue, token: str, size: int, applies: bool) -> None:
    """Serve a shard of `size` bytes."""
    optimizer = optax.sgd(0.1)
    params = {"w": np.zeros((size // 4096, 1024), np.float32)}
    shard = Shard(optimizer, params, optimizer.init(params))

    def handle(request: Message) -> Message:
        if request.name == "pull":
            return Message("params", {}, shard.pull(0))
        if applies:
            shard.push_and_apply(request.fields["number"], 0, request.arrays, GOOD)
        return Message("done")

    listener = Listener(handle, token=token, most=2 * size)
    port.put(listener.port)
    time.sleep(3600)


def copy(port: multiprocessing.Queue, size: int) -> None:
    """Receive and send `size` bytes again and again."""
    with socket.socket() as listener:
        listener.bind((LOOPBACK, 0))
        listener.listen()
        port.put(listener.getsockname()[1])
        peer, _ = listener.accept()
        buffer = np.empty(size, np.uint8)
        while True:
            fill(peer, buffer)
            peer.sendall(buffer.data)


def fill(peer: socket.socket, buffer: np.ndarray) -> None:
    """Receive a whole buffer."""
    view, done = buffer.data, 0
    while done < len(view):
        count = peer.recv_into(view[done:])
        if not count:
            raise SystemExit
        done += count


def main() -> None:
    """Measure, and print a table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--megabytes", type=int, default=100)
    parser.add_argument("--pairs", type=int, default=9)
    args = parser.parse_args()
    size, token = args.megabytes << 20, secrets.token_hex(16)
    os.environ.update(with_huge_pages(os.environ))  # as the supervisor sets it for servers
    context = multiprocessing.get_context("spawn")
    started = []

    def begin(target, *arguments) -> int:
        port = context.Queue()
        started.append(context.Process(target=target, args=(port, *arguments), daemon=True))
        started[-1].start()
        return port.get(timeout=120)

    def client(share: int, applies: bool) -> Client:
        port = begin(hold, token, share, applies)
        return Client("server", port, token=token, most=2 * size, timeout=60)

    servers = {
        "server, frames alone": [client(size, False)],
        "server, SGD": [client(size, True)],
        "2 servers, SGD": [client(size // 2, True) for _ in range(2)],
    }
    bare = socket.create_connection((LOOPBACK, begin(copy, size)))
    gradient, buffer = np.ones(size // 4, np.float32), np.empty(size, np.uint8)

    def copy_both_ways() -> float:
        began = time.perf_counter()
        bare.sendall(gradient.view(np.uint8).data)
        fill(bare, buffer)
        return time.perf_counter() - began

    def push_and_pull(clients: list[Client], number: int) -> float:
        parts = [part.reshape(-1, 1024) for part in np.split(gradient, len(clients))]
        began = time.perf_counter()
        call_all(clients, [Message("push", {"number": number}, [part]) for part in parts])
        call_all(clients, [Message("pull")] * len(clients))
        return time.perf_counter() - began

    rows = {}
    for name, clients in servers.items():
        with closing(clients):
            push_and_pull(clients, 1)
            pairs = [(copy_both_ways(), push_and_pull(clients, 2 + i)) for i in range(args.pairs)]
        ratio = statistics.median(base / ours for base, ours in pairs)
        rows[name] = statistics.median(ours for _, ours in pairs), ratio
        rows.setdefault("bare sockets", (statistics.median(base for base, _ in pairs), 1.0))
    for process in started:
        process.terminate()
    print(f"{args.megabytes} MB each way, {os.cpu_count()} processors, JAX {jax.__version__}\n")
    print("| | updates/s | MB/s | of bare sockets |\n|---|---|---|---|")
    for name, (seconds, ratio) in rows.items():
        print(f"| {name} | {1 / seconds:.1f} | {2 * size / 1e6 / seconds:.0f} | {ratio:.0%} |")


if __name__ == "__main__":
    main()
