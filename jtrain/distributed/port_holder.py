"""Program that listens at a port of this machine."""

import os
import re
from pathlib import Path

LISTENS = "0A"  # state of a socket, in hexadecimal: TCP_LISTEN of include/net/tcp_states.h


def find_port_holder(port: int, root: Path = Path("/proc")) -> str:
    """Return the program that listens at a port: `process 4711 (python3)`; "" if unknown.

    The kernel shows the sockets of all, and the files of a process only to its own user.
    """
    sockets = {f"socket:[{inode}]" for inode in _listening(port, root)}
    for pid in sorted(filter(str.isdigit, _names(root)), key=int) if sockets else ():
        for file in _names(root / pid / "fd"):
            try:
                found = os.readlink(root / pid / "fd" / file) in sockets
                name = (root / pid / "comm").read_text().strip() if found else ""
            except (OSError, UnicodeDecodeError):
                continue
            if found:
                return f"process {pid} ({name})"
    return "a process of another user" if sockets else ""


def _listening(port: int, root: Path) -> list[str]:
    """Return the inodes of the sockets that listen at a port."""
    inodes = []
    for table in ("tcp", "tcp6"):
        try:
            lines = (root / "self/net" / table).read_text().splitlines()[1:]
        except OSError:
            continue
        for row in map(str.split, lines):  # local address, remote one, state ... inode: proc(5)
            if row[1].endswith(f":{port:04X}") and row[3] == LISTENS:
                inodes.append(row[9])
    return inodes


def _names(folder: Path) -> list[str]:
    try:
        return os.listdir(folder)
    except OSError:
        return []


def stop_advice(holder: str) -> str:
    """Return how to stop a program that `find_port_holder` found: `kill 4711`; "" if unknown."""
    found = re.match(r"process (\d+) ", holder)
    return f"kill {found[1]}" if found else ""
