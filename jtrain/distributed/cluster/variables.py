"""Environment of a process of a cluster: its variables, CPU devices and command line."""

import os
from collections.abc import Mapping

from jtrain.distributed.cluster.cluster import CoordinatorAddress
from jtrain.distributed.cpu_threads import NUMBER as NUMBER
from jtrain.errors import ConfigError


class ClusterVariables:
    """Environment variables of one kind of cluster; `used` records each variable that was read."""

    def __init__(self, environ: Mapping[str, str], kind: str):
        self._environ, self._kind = environ, kind
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
            f"{self._kind} is half set: {self.described or 'a part of it'} is set, and {name} is "
            f"missing. Set {name} too, or unset the others to run in one process."
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
            f"{self._kind}: {name} should be a number from 0 on and is {text!r}. Set {name}=0, say."
        )

    @property
    def described(self) -> str:
        """The variables that were read, as text: `RANK=1, WORLD_SIZE=2`."""
        # A list may have a line each.
        return ", ".join(f"{name}={' '.join(value.split())}" for name, value in self.used.items())

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


LAUNCHER = "JTRAIN_LAUNCHER"  # `jtrain launch --processes 2`, set by it for the processes it starts


def program() -> str:
    """Return the words before the verb: `jtrain`, or `jtrain launch` with its options."""
    return os.environ.get(LAUNCHER) or "jtrain"


def sets_cpu_devices(environ: Mapping[str, str]) -> bool:
    """Return whether the environment sets it, by JAX's variable or by XLA's flag."""
    forced = "xla_force_host_platform_device_count" in environ.get("XLA_FLAGS", "")
    return forced or NUMBER in environ
