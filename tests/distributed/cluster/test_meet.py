"""Processes meet before JAX starts: all get one answer, which names a missing or other one."""

import errno
import os
import re
import socket
import threading
import time

import pytest

from jtrain.distributed.cluster import detect
from jtrain.distributed.cluster.cluster import Cluster, CoordinatorAddress
from jtrain.distributed.cluster.rendezvous import HELLO, bind_host, meet
from jtrain.distributed.launcher.port import free_port
from jtrain.errors import ConfigError, PeerError

SAME = {"config seed": "0", "package jax": "0.10.2"}


def member(index: int, processes: int, port: int) -> Cluster:
    where = CoordinatorAddress("127.0.0.1", port)
    by = {"JTRAIN_COORDINATOR": str(where)}
    return Cluster(kind="x", processes=processes, index=index, coordinator=where, by=by)


def ends(members: list[tuple[Cluster, dict]], timeout: float = 5.0) -> list[Exception | None]:
    """Return the error of each process, None without one."""
    found: list[Exception | None] = [None] * len(members)

    def one(place: int, cluster: Cluster, facts: dict) -> None:
        try:
            meet(cluster, facts, timeout=timeout)
        except (ConfigError, PeerError) as error:
            found[place] = error

    threads = [
        threading.Thread(target=one, args=(place, *each)) for place, each in enumerate(members)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=100)
        assert not thread.is_alive()
    return found


def test_processes_with_equal_facts_meet():
    port = free_port()
    assert ends([(member(i, 5, port), SAME) for i in (3, 1, 0, 4, 2)]) == [None] * 5
    socket.create_server(("127.0.0.1", port)).close()  # and the port is free again


def test_a_difference_is_named_in_all_processes():
    port = free_port()
    other = {"config seed": "1", "package jax": "0.10.2", "code jtrain/core/step.py": "ab12"}
    found = ends(
        [(member(0, 3, port), SAME), (member(1, 3, port), SAME), (member(2, 3, port), other)],
        timeout=1.0,
    )
    assert list(map(type, found)) == [PeerError, PeerError, ConfigError]
    assert "process 2 did not" in str(found[0])
    for said in map(str, found):
        assert "process 2 (from 127.0.0.1) differs from process 0" in said
        assert "config seed: 0 in process 0, 1 in process 2" in said
        assert "code jtrain/core/step.py: none in process 0, ab12 in process 2" in said
        assert "package jax" not in said
        assert "Start all of them by the same command" in said


def test_a_missing_process_is_named_in_time():
    port = free_port()
    began = time.monotonic()
    found = ends([(member(i, 4, port), SAME) for i in (0, 2)], timeout=1.5)
    assert time.monotonic() - began < 1.5 + HELLO, "no greeting is waited for"
    for error in found:
        assert isinstance(error, PeerError)
        assert "2 of 4 processes reached 127.0.0.1" in str(error)
        assert "process 1, 3 did not. Start them with the same JTRAIN_COORDINATOR" in str(error)
        assert "parallel.start_timeout=3" in str(error)


def test_a_coordinator_that_is_not_there_is_named():
    port = free_port()
    (error,) = ends([(member(1, 2, port), SAME)], timeout=0.3)
    assert isinstance(error, PeerError)
    assert f"tried 0.3 s to reach process 0 at 127.0.0.1:{port}" in str(error)
    assert "name its machine by JTRAIN_COORDINATOR" in str(error)


def test_an_unknown_machine_is_named():
    nowhere = Cluster(
        kind="x",
        processes=2,
        index=1,
        coordinator=CoordinatorAddress("no-such-host.invalid", 1),
        by={},
    )
    (error,) = ends([(nowhere, SAME)], timeout=0.2)
    assert "no machine is named no-such-host.invalid" in str(error)


def test_two_processes_with_one_number_are_refused():
    port = free_port()
    found = ends([(member(i, 3, port), SAME) for i in (0, 1, 1)], timeout=1.0)
    assert all("two processes are both process 1 of 3" in str(e) for e in found)


def test_different_numbers_of_processes_are_refused():
    port = free_port()
    found = ends([(member(0, 2, port), SAME), (member(1, 4, port), SAME)], timeout=1.0)
    for error in found:
        assert "as one of 2, and process 1 (from 127.0.0.1) as one of 4" in str(error)


def test_a_port_in_use_is_refused_with_its_holder_and_another_port():
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError, match=f"cannot listen at 127.0.0.1:{port} ") as error:
            meet(member(0, 2, port), SAME, timeout=1.0)
        said = str(error.value)
        assert f"(process {os.getpid()} (" in said
        assert f"listens at port {port}). Set JTRAIN_COORDINATOR=127.0.0.1:" in said
        assert said.endswith(f"for all processes, or stop it: kill {os.getpid()}")
        # The advice, under a launcher that chose the port itself.
        told = re.search(r"Set (\w+)=(\S+) for all", said)
        assert told is not None
        slurm = {
            "SLURM_JOB_ID": "1",
            "SLURM_STEP_NODELIST": "node1",
            "SLURM_STEP_NUM_TASKS": "2",
            "SLURM_PROCID": "0",
        }
        other = detect(slurm | {told[1]: told[2]}).coordinator
        assert other is not None
        assert ends([(member(i, 2, other.port), SAME) for i in range(2)]) == [None, None]


def test_an_address_of_another_machine_is_refused(monkeypatch: pytest.MonkeyPatch):
    def refuse(*_, **__) -> socket.socket:
        raise OSError(errno.EADDRNOTAVAIL, "Cannot assign requested address")

    monkeypatch.setattr(socket, "create_server", refuse)  # tests may not bind to any other address
    with pytest.raises(ConfigError, match=r"Give it an address of this machine .* JTRAIN_COORD"):
        meet(member(0, 2, 8476), SAME, timeout=1.0)


def test_another_program_at_the_port_is_not_taken_for_process_0():
    with socket.create_server(("127.0.0.1", 0)) as taken:

        def answer() -> None:
            peer, _ = taken.accept()
            peer.recv(10)
            peer.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n")
            peer.close()

        threading.Thread(target=answer).start()
        with pytest.raises(PeerError, match="another program has that port"):
            meet(member(1, 2, taken.getsockname()[1]), SAME, timeout=2.0)


def test_strangers_are_dropped():
    port = free_port()

    def stranger() -> None:
        for _ in range(100):
            try:
                with socket.create_connection(("127.0.0.1", port)) as peer:
                    peer.sendall(b"GET / HTTP/1.1\r\n")
                return
            except OSError:
                time.sleep(0.01)

    def late() -> None:
        time.sleep(0.3)
        meet(member(1, 2, port), SAME, timeout=5.0)

    threads = [threading.Thread(target=stranger), threading.Thread(target=late)]
    for thread in threads:
        thread.start()
    meet(member(0, 2, port), SAME, timeout=5.0)
    for thread in threads:
        thread.join(timeout=100)


def test_listens_on_the_loopback_where_the_coordinator_is():
    assert (
        bind_host(CoordinatorAddress("127.0.0.1", 1))
        == bind_host(CoordinatorAddress("localhost", 1))
        == "127.0.0.1"
    )
    assert bind_host(CoordinatorAddress("::1", 1)) == "::1"
    assert bind_host(CoordinatorAddress("198.51.100.7", 1)) == "198.51.100.7"
    assert bind_host(CoordinatorAddress("no-such-host.invalid", 1)) == ""


def test_an_address_of_the_internet_gives_a_warning():
    def describe(host: str) -> list[str]:
        at = CoordinatorAddress(host, 8476)
        return Cluster(kind="x", processes=2, index=0, coordinator=at, by={"HOST": host}).describe()

    for host in ("8.8.8.8", "2606:4700::1111"):
        _, warning = describe(host)
        assert f"{host} can be reached from the internet" in warning
        assert "keep its port behind a firewall, or name an address" in warning
        assert "by HOST" in warning
    for host in ("127.0.0.1", "10.1.2.3", "192.168.0.9", "fd00::1", "::1", "host-0", "localhost"):
        assert len(describe(host)) == 1
