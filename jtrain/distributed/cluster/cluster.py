"""Cluster: the processes that train together, and the variables that define them."""

import dataclasses
import ipaddress
import os
from collections.abc import Mapping
from typing import Literal, NamedTuple, TypeAlias

from jtrain.distributed.cpu_threads import NUMBER as NUMBER
from jtrain.errors import ConfigError

PORT = 8476  # the default port; TPUs use it, too
LOOPBACK = "127.0.0.1"
LAUNCHER = "JTRAIN_LAUNCHER"  # `jtrain launch --processes 2`, set by it for the processes it starts

Facts: TypeAlias = Mapping[str, str]
MOST = 12  # facts that an error lists


class CoordinatorAddress(NamedTuple):
    """Address at which the first process listens."""

    host: str
    port: int

    @classmethod
    def parse(cls, text: str, variable: str) -> "CoordinatorAddress":
        """Parse `HOST:PORT`, an IPv6 host in brackets.

        Raises:
            ConfigError: if the text is not an address; `variable` is the source of the text.
        """
        host, _, port = text.rpartition(":")
        bare = ":" in host and not (host.startswith("[") and host.endswith("]"))
        wrong = not host or bare or "/" in host
        if wrong or not port.isascii() or not port.isdigit() or not 0 < int(port) < 65536:
            raise ConfigError(
                f"{variable} is the address of process 0, and {text!r} is not HOST:PORT. Set "
                f"{variable}=10.0.0.1:8476, say: its machine and a free port there."
            )
        return cls(host.removeprefix("[").removesuffix("]"), int(port))

    @property
    def loopback(self) -> bool:
        """True if only this machine reaches the address."""
        try:
            return ipaddress.ip_address(self.host).is_loopback
        except ValueError:
            return self.host == "localhost"

    @property
    def public(self) -> bool:
        """True for an address of the internet, which only a firewall confines to a cluster."""
        try:
            return ipaddress.ip_address(self.host).is_global
        except ValueError:  # a name: its address is known only after a look-up
            return False

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Cluster:
    """The processes that train together, and the index of this one."""

    kind: str = "one process"
    """The launcher's usual name."""
    processes: int = 1
    index: int = 0
    """This process's number, from 0; process 0 is the coordinator, and it writes and logs."""
    coordinator: CoordinatorAddress | None = None
    """Address of process 0; None for a single process."""
    devices: tuple[int, ...] = ()
    """The accelerators of this machine that it takes, by number; empty: all."""
    role: Literal["trains", "evaluates"] = "trains"
    servers: int = 0
    """Processes that are parameter servers, from process 1 on, where the variables say so."""
    by: Mapping[str, str] = dataclasses.field(default_factory=dict)
    """The variables that define the cluster, with their values."""
    note: str = ""
    """A further remark on the detection."""
    warning: str = ""
    """A sign that more processes were meant to train together; a run logs it."""

    @property
    def variables(self) -> str:
        """The variables as text: `RANK=1, WORLD_SIZE=2`."""
        return describe_variables(self.by)

    def describe(self) -> list[str]:
        """Return the lines that a run logs; of a single process only a warning."""
        if self.processes == 1:
            return [self.warning] if self.warning else []
        where = f" at {self.coordinator}" if self.coordinator else ""
        lines = [f"process {self.index} of {self.processes} ({self.kind}){where}"]
        if self.coordinator and self.coordinator.public:
            lines.append(
                f"{self.coordinator.host} can be reached from the internet, and anyone who reaches "
                f"the processes there can run code in them: keep its port behind a firewall, or "
                f"name an address of the cluster's own network by {', '.join(self.by)}"
            )
        return lines

    def plain(self) -> dict:
        """Return the cluster as plain values."""
        return {**dataclasses.asdict(self), "coordinator": str(self.coordinator or "")}

    def __str__(self) -> str:
        lines = {
            "cluster": self.kind,
            "process": f"{self.index} of {self.processes}, {self.role}",
            "coordinator": str(self.coordinator or ""),
            "devices": ", ".join(map(str, self.devices)) or "all that the process sees",
            "by": self.variables or "no variable of a cluster is set",
            "note": self.note,
            "warning": self.warning,
        }
        return "\n".join(f"{name:11}  {value}" for name, value in lines.items() if value)


def describe_variables(variables: Mapping[str, str]) -> str:
    """Return variables as text, on one line: `RANK=1, WORLD_SIZE=2`."""
    return ", ".join(f"{name}={' '.join(value.split())}" for name, value in variables.items())


class ClusterVariables:
    """Environment variables of one kind of cluster; `used` records each variable that was read."""

    def __init__(self, environ: Mapping[str, str], kind: str):
        self._environ, self.kind = environ, kind
        self.used: dict[str, str] = {}

    def get(self, name: str, default: str = "") -> str:
        """Return the text of a variable; `default` if it is not set or empty."""
        value = self._environ.get(name, "").strip()
        if value:
            self.used[name] = value
        return value or default

    def text(self, name: str) -> str:
        """Return the text of a variable that must be set.

        Raises:
            ConfigError: if it is not set, with the variables that are.
        """
        if value := self.get(name):
            return value
        raise ConfigError(
            f"{self.kind} is half set: {describe_variables(self.used) or 'a part of it'} is set, "
            f"and {name} is missing. Set {name} too, or unset the others to run in one process."
        )

    def number(self, name: str, default: int | None = None) -> int:
        """Return the number in a variable.

        Raises:
            ConfigError: if the text is not a number, or is missing without a default.
        """
        text = self.text(name) if default is None else self.get(name, str(default))
        if text.isascii() and text.isdigit():
            return int(text)
        raise ConfigError(
            f"{self.kind}: {name} should be a number from 0 on and is {text!r}. Set {name}=0, say."
        )

    def coordinator(self) -> CoordinatorAddress | None:
        """Return the address that a person set; None without one.

        Raises:
            ConfigError: if it is no address.
        """
        text = self.get("JTRAIN_COORDINATOR")
        return CoordinatorAddress.parse(text, "JTRAIN_COORDINATOR") if text else None

    def local_gpus(self, local: int, local_processes: int) -> tuple[int, ...]:
        """Return the GPUs of one of several processes that all see the same GPUs; () for all."""
        visible = [gpu for gpu in self.get("CUDA_VISIBLE_DEVICES").split(",") if gpu]
        each, rest = divmod(len(visible), local_processes)
        if local_processes == 1 or not each or rest:
            return ()
        return tuple(range(local * each, (local + 1) * each))


def command_words() -> str:
    """Return the words before the verb: `jtrain`, or `jtrain launch` with its options."""
    return os.environ.get(LAUNCHER) or "jtrain"


def sets_cpu_devices(environ: Mapping[str, str]) -> bool:
    """Return whether the environment sets their number, by JAX's variable or by XLA's flag."""
    forced = "xla_force_host_platform_device_count" in environ.get("XLA_FLAGS", "")
    return forced or NUMBER in environ


def difference(facts: Facts, other: Facts, index: int, where: str = "") -> ConfigError | None:
    """Return the facts in which a process differs from process 0; None if they are equal.

    Args:
        facts: those of process 0.
        other: those of process `index`, which lies at `where`.
    """
    names = [name for name in {**facts, **other} if facts.get(name) != other.get(name)]
    if not names:
        return None
    rows = [
        f"  {name}: {facts.get(name, 'none')} in process 0, {other.get(name, 'none')} in process "
        f"{index}"
        for name in names[:MOST]
    ]
    rows += [f"  and {len(names) - MOST} more"] * (len(names) > MOST)
    return ConfigError(
        f"process {index}{where} differs from process 0:\n"
        + "\n".join(rows)
        + "\nStart all of them by the same command, from the same files and packages."
    )
