"""Which addresses processes listen at, as the kernel says."""

import contextlib
import ipaddress
import os
import struct
from pathlib import Path

LISTENS = "0A"


def descendants(pid: int) -> set[int]:
    """The process and all that it started."""
    parents: dict[int, list[int]] = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = stat.read_text().rpartition(")")[2].split()
        except OSError:  # ended since it was listed
            continue
        parents.setdefault(int(fields[1]), []).append(int(stat.parent.name))
    found, ahead = set(), [pid]
    while ahead:
        one = ahead.pop()
        found.add(one)
        ahead += parents.get(one, [])
    return found


def listening(pid: int) -> set[str]:
    """The addresses at which a process and its descendants listen."""
    sockets = {socket for each in descendants(pid) for socket in _sockets(each)}
    found = set()
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == LISTENS and fields[9] in sockets:
                found.add(_address(fields[1].partition(":")[0]))
    return found


def _sockets(pid: int) -> list[str]:
    """The inodes of a process's sockets."""
    found = []
    with contextlib.suppress(OSError):  # it has ended
        for name in os.listdir(f"/proc/{pid}/fd"):
            with contextlib.suppress(OSError):  # it was closed since it was listed
                target = os.readlink(f"/proc/{pid}/fd/{name}")
                if target.startswith("socket:["):
                    found.append(target[len("socket:[") : -1])
    return found


def _address(text: str) -> str:
    """`0100007F` is 127.0.0.1: words of 32 bits in the machine's order."""
    words = [text[i : i + 8] for i in range(0, len(text), 8)]
    raw = b"".join(struct.pack("=I", int(word, 16)) for word in words)
    address = ipaddress.ip_address(raw)
    mapped = getattr(address, "ipv4_mapped", None)
    return str(mapped or address)
