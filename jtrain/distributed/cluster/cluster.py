"""Processes that train together."""

import dataclasses
import ipaddress
from collections.abc import Mapping
from typing import Literal, NamedTuple

from jtrain.errors import ConfigError


class CoordinatorAddress(NamedTuple):
    """Where the first process can be reached."""

    host: str
    port: int

    @classmethod
    def parse(cls, text: str, variable: str) -> "CoordinatorAddress":
        """`HOST:PORT`, an IPv6 host in brackets.

        Raises:
            ConfigError: if it is none; `variable` is where it was said.
        """
        host, _, port = text.rpartition(":")
        if not host or not port.isascii() or not port.isdigit() or not 0 < int(port) < 65536:
            raise ConfigError(
                f"{variable} names where process 0 is reached, and {text!r} is no HOST:PORT. "
                f"Set {variable}=10.0.0.1:8476, say: its machine and a free port of it."
            )
        return cls(host.removeprefix("[").removesuffix("]"), int(port))

    @property
    def loopback(self) -> bool:
        """Whether only this machine reaches it."""
        try:
            return ipaddress.ip_address(self.host).is_loopback
        except ValueError:
            return self.host == "localhost"

    @property
    def public(self) -> bool:
        """Whether it is an address of the internet, which a firewall alone keeps to a cluster."""
        try:
            return ipaddress.ip_address(self.host).is_global
        except ValueError:  # a name: what it stands for is known where it is looked up
            return False

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Cluster:
    """Which processes train together, and which of them this one is."""

    kind: str = "one process"
    """What started them, as people call it."""
    processes: int = 1
    index: int = 0
    """This one's, from 0; process 0 is the one that others come to, and that writes and speaks."""
    coordinator: CoordinatorAddress | None = None
    """Of process 0; None where there is no other."""
    devices: tuple[int, ...] = ()
    """The accelerators of this machine that it takes, by their numbers; none said: all."""
    role: Literal["trains", "evaluates"] = "trains"
    by: Mapping[str, str] = dataclasses.field(default_factory=dict)
    """The variables that said so, as they are set."""
    note: str = ""
    """What else a reader should know of how it was found."""

    def __post_init__(self):
        if not 0 <= self.index < self.processes:
            raise ConfigError(
                f"{self.kind}: this is process {self.index} of {self.processes}, and they count "
                f"from 0 ({self.spelt}). Set an index in 0 .. {self.processes - 1}, or as many "
                f"processes as are started."
            )

    @property
    def spelt(self) -> str:
        """`RANK=1, WORLD_SIZE=2`."""
        return ", ".join(f"{name}={value}" for name, value in self.by.items())

    def news(self) -> list[str]:
        """What a run says of it: nothing if there is one process."""
        if self.processes == 1:
            return []
        where = f" at {self.coordinator}" if self.coordinator else ""
        lines = [f"process {self.index} of {self.processes} ({self.kind}){where}"]
        if self.coordinator and self.coordinator.public:
            lines.append(
                f"{self.coordinator.host} can be reached from the internet, and whoever reaches "
                f"the processes there can run code in them: keep its port behind a firewall, or "
                f"name an address of the cluster's own network by {', '.join(self.by)}"
            )
        return lines

    def plain(self) -> dict:
        """The same as plain values."""
        return {
            "kind": self.kind,
            "processes": self.processes,
            "index": self.index,
            "coordinator": str(self.coordinator) if self.coordinator else "",
            "devices": list(self.devices),
            "role": self.role,
            "by": dict(self.by),
            "note": self.note,
        }

    def __str__(self) -> str:
        lines = {
            "cluster": self.kind,
            "process": f"{self.index} of {self.processes}, {self.role}",
            "coordinator": str(self.coordinator or ""),
            "devices": ", ".join(map(str, self.devices)) or "all that the process sees",
            "by": self.spelt or "no variable of a cluster is set",
            "note": self.note,
        }
        return "\n".join(f"{name:11}  {value}" for name, value in lines.items() if value)
