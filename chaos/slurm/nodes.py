"""Slurm's daemons in namespaces of their own: FOLDER ROOT NODE=ADDRESS ...

This is process 1 of its PID namespace, so that the kernel ends every daemon, step and task with it:
it ends when its standard input is closed, which the death of the test's process does too. The
network and the names of the hosts are its own, so ports are free and no file of the machine
changes.
"""

import fcntl
import signal
import socket
import struct
import subprocess
import sys
from pathlib import Path

SIOCSIFFLAGS, SIOCSIFADDR, SIOCSIFNETMASK = 0x8914, 0x8916, 0x891C
UP_AND_RUNNING = 0x41


def set_addresses(addresses: list[str]) -> None:
    """Bring up the loopback interface, and give it further addresses."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as control:
        fcntl.ioctl(control, SIOCSIFFLAGS, struct.pack("16sh", b"lo", UP_AND_RUNNING))
        for number, address in enumerate(addresses, 1):
            for request, value in ((SIOCSIFADDR, address), (SIOCSIFNETMASK, "255.255.255.255")):
                name = f"lo:{number}".encode()
                packed = struct.pack("16sHH4s8x", name, socket.AF_INET, 0, socket.inet_aton(value))
                fcntl.ioctl(control, request, packed)


def set_hosts(folder: Path, nodes: dict[str, str]) -> None:
    """Let the names of the nodes resolve."""
    lines = [f"127.0.0.1 localhost {socket.gethostname()}"]
    lines += [f"{address} {name}" for name, address in nodes.items()]
    (folder / "hosts").write_text("\n".join(lines) + "\n")
    subprocess.run(["mount", "--bind", folder / "hosts", "/etc/hosts"], check=True)


def main(folder: Path, root: Path, nodes: dict[str, str]) -> None:
    """Start the daemons, and end with them when the standard input is closed."""
    set_addresses(list(nodes.values()))
    set_hosts(folder, nodes)
    sbin = root / "usr" / "sbin"
    commands = {"slurmctld": [sbin / "slurmctld-wlm", "-D", "-c"]}
    for name in nodes:
        commands[name] = [sbin / "slurmd-wlm", "-D", "-N", name, "-d", sbin / "slurmstepd-wlm"]
    for name, command in commands.items():
        with (folder / f"{name}.log").open("w") as log:
            subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the kernel reaps orphans
    sys.stdout.write("started\n")
    sys.stdout.flush()
    sys.stdin.read()


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]), dict(each.split("=") for each in sys.argv[3:]))
