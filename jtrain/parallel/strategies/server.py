"""Parameter server: workers and servers are processes of their own, beside that of the run."""

from collections.abc import Callable, Sequence, Set
from typing import Any, Literal

import optax
from pydantic import Field, model_validator

from jtrain.config.configclass import configclass
from jtrain.errors import ConfigError
from jtrain.parallel.device_names import Devices
from jtrain.parallel.devices import Device, one_device
from jtrain.parallel.strategies.local_steps import with_local_steps
from jtrain.parallel.strategies.server_modes import DiLoCo, LocalSGD, Mode, Sync
from jtrain.parallel.strategies.single import OneDevice
from jtrain.parallel.strategies.strategy import BaseParallelConfig


class ParameterServer(OneDevice):
    """The strategy of the run's own process: it evaluates and saves, and others take the steps."""

    loop = "jtrain.server.server_loop:server_loop"

    def __init__(self, device: Device, config: "Server"):
        super().__init__(device)
        self._config = config

    def optimizer(self, rule: optax.GradientTransformation, /) -> optax.GradientTransformation:
        """Return the rule, below an outer one where the workers take steps of their own."""
        outer = outer_rule(self._config.mode)
        return rule if outer is None else with_local_steps(rule, outer, self._config.workers)

    def compile(
        self, fn: Callable, state: Any, batch: Any, /, *, stacked: bool = False, keeps: bool = False
    ) -> Callable:
        """Compile what evaluates; the step is only traced, for the workers compile theirs."""
        if not keeps:
            return super().compile(fn, state, batch, stacked=stacked, keeps=keeps)
        self.lower(fn, state, batch, stacked=stacked, keeps=keeps)

        def refuse(state: Any, batch: Any) -> Any:
            raise ConfigError(
                "parallel.kind=server measures no time of a step before the run: count steps, "
                "evaluate.every and checkpoint.every in steps, epochs or tokens."
            )

        return refuse


def outer_rule(mode: Any) -> optax.GradientTransformation | None:
    """Return the outer optimizer of a mode; None where there are no local steps."""
    if isinstance(mode, LocalSGD):
        return optax.sgd(1.0)
    if isinstance(mode, DiLoCo):
        return optax.sgd(mode.lr, momentum=mode.momentum or None, nesterov=bool(mode.momentum))
    return None


@configclass
class Server(BaseParallelConfig):
    """Parameter servers hold the state, and workers pull parameters and push gradients."""

    kind: Literal["server"] = "server"
    devices: Devices = 0
    """The device of the run's own process, which evaluates: 0 for the first; [2]; or cpu, gpu:1."""
    workers: int = Field(default=2, ge=1)
    """Processes that compute gradients."""
    shards: int = Field(default=1, ge=1)
    """Processes that hold the parameters and the optimizer's state, each an equal part of the
    bytes."""
    mode: Mode = Sync()
    """Order of the steps: sync, ssp, async, local_sgd or diloco."""
    engine: Literal["local", "ray"] = "local"
    """Engine that starts the processes: local, on this machine."""
    port: int = Field(default=0, ge=0, lt=65536)
    """Port of the run's own process on the loopback; 0: a free one."""
    snapshot_every: int = Field(default=100, ge=1)
    """Steps between copies of the servers' state in the run's own process, from which a server
    that died is restored."""
    timeout: float = Field(default=60.0, gt=0)
    """Seconds after which a server that does not answer is killed and started again; a worker, that
    may have to compile, after ten times as many."""
    restarts: int = Field(default=3, ge=0)
    """Restarts of a process within one snapshot; one more failure ends the run."""

    @model_validator(mode="after")
    def _check(self) -> "Server":
        if isinstance(self.mode, Sync) and self.mode.backups >= self.workers:
            raise ConfigError(
                f"parallel.mode.backups={self.mode.backups} of parallel.workers={self.workers} "
                f"would leave no worker. At most {self.workers - 1}."
            )
        if self.engine == "ray":
            raise ConfigError(
                "parallel.engine=ray is not supported yet: servers and workers run on one machine. "
                "Set parallel.engine=local."
            )
        return self

    @classmethod
    def list_variants(cls, counts: Sequence[int], dims: Set[str]) -> dict[str, BaseParallelConfig]:
        """Return none: the processes of a server are not the devices of a check."""
        del counts, dims
        return {}

    def build(self, among: Sequence[Device] | None = None) -> ParameterServer:
        """Build the strategy of the run's own process.

        Raises:
            ConfigError: if `devices` is not one device.
        """
        return ParameterServer(one_device(self.devices, among), self)
