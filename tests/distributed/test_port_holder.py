"""The program at a port is named by its process, where the kernel shows it."""

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from jtrain.distributed.port_holder import find_port_holder, stop_advice

LISTENER = """
import socket, sys
with socket.create_server(("127.0.0.1", 0)) as one:
    print(one.getsockname()[1], flush=True)
    sys.stdin.readline()
"""


@pytest.mark.skipif(not Path("/proc/self/net/tcp").exists(), reason="no /proc of Linux")
def test_names_the_process_that_listens():
    command = [sys.executable, "-c", LISTENER]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        port = int(process.stdout.readline())
        found = find_port_holder(port)
        process.kill()
    assert found.startswith(f"process {process.pid} (python")
    assert stop_advice(found) == f"kill {process.pid}"
    assert find_port_holder(port) == ""


def test_only_a_listener_holds_a_port():
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        assert find_port_holder(one.getsockname()[1]) == ""


def test_a_process_of_another_user_is_known_to_be_one(tmp_path: Path):
    tables = tmp_path / "self/net"
    tables.mkdir(parents=True)
    row = "0: 0100007F:211C 00000000:0000 0A 00000000:00000000 00:00000000 0 1000 0 4242 1"
    (tables / "tcp").write_text(f"  sl  local_address\n{row}\n")
    assert find_port_holder(8476, tmp_path) == "a process of another user"
    assert stop_advice("a process of another user") == ""
    (tmp_path / "77" / "fd").mkdir(parents=True)
    (tmp_path / "77" / "comm").write_text("gunicorn\n")
    os.symlink("socket:[4242]", tmp_path / "77/fd/3")
    assert find_port_holder(8476, tmp_path) == "process 77 (gunicorn)"
    assert find_port_holder(8477, tmp_path) == ""
