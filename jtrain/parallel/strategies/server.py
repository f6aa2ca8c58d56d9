"""Parameter server: workers and servers are processes of their own, beside that of the run."""

from collections.abc import Callable, Sequence, Set
from typing import Any, Literal

import optax
from jax.stages import Lowered
from pydantic import Field, model_validator

from jtrain.config.configclass import configclass
from jtrain.errors import ConfigError
from jtrain.parallel.devices import Device, Devices, one_device
from jtrain.parallel.strategies.outer_optimizer import (
    delayed_nesterov,
    with_local_steps,
    with_published,
)
from jtrain.parallel.strategies.server_modes import (
    AsyncDiLoCo,
    Compensate,
    Compression,
    DiLoCo,
    LocalSGD,
    Mode,
    StreamingDiLoCo,
    Sync,
    Uncompressed,
    has_feedback,
    splits_rows,
)
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
        outer = outer_rule(self._config)
        if outer is None:
            return rule
        residual = has_feedback(self._config.compress)
        return with_local_steps(
            rule,
            outer,
            self._config.workers,
            residual=residual,
            params=isinstance(self._config.mode, StreamingDiLoCo),
        )

    def _load(self, lowered: Lowered, state: Any, batch: Any, *, returns_state: bool) -> Callable:
        """Compile what evaluates; the step is only traced, for the workers compile theirs."""
        if not returns_state:
            return super()._load(lowered, state, batch, returns_state=returns_state)

        def refuse(state: Any, batch: Any) -> Any:
            raise ConfigError(
                "parallel.kind=server measures no time of a step before the run: count steps, "
                "evaluate.every and checkpoint.every in steps, epochs or tokens."
            )

        return refuse


def outer_rule(config: "Server") -> optax.GradientTransformation | None:
    """Return the outer optimizer of a mode; None where there are no local steps."""
    mode, rule = config.mode, None
    if isinstance(mode, LocalSGD):
        rule = optax.sgd(1.0)
    if isinstance(mode, AsyncDiLoCo):
        rule = delayed_nesterov(mode.lr, mode.momentum, mode.delay or config.workers)
    if isinstance(mode, DiLoCo | StreamingDiLoCo):
        rule = optax.sgd(mode.lr, momentum=mode.momentum or None, nesterov=bool(mode.momentum))
    return with_published(rule) if rule is not None and config.pulls == "int8" else rule


@configclass
class Server(BaseParallelConfig):
    """Parameter servers hold the state, and workers pull parameters and push gradients."""

    kind: Literal["server"] = "server"
    devices: Devices = 0
    """The device of the run's own process, which evaluates: 0 for the first; [2]; or cpu, gpu:1."""
    workers: int = Field(default=2, ge=1)
    """Processes that compute gradients; in sync, local_sgd and diloco also the number of shares of
    the rows, whoever takes them."""
    min_workers: int = Field(default=1, ge=1)
    """Workers with which the run goes on when others leave; with fewer it waits. Under sync and
    streaming_diloco it always waits for all."""
    max_workers: int = Field(default=0, ge=0)
    """Workers that compute at the same time, those that join by `jtrain work` included; any further
    one stands by. 0: as many as `workers`."""
    shards: int = Field(default=1, ge=1)
    """Processes that hold the parameters and the optimizer's state, each an equal part of the
    bytes."""
    mode: Mode = Sync()
    """Order of the steps: sync, ssp, async, local_sgd, diloco, streaming_diloco or async_diloco."""
    compress: Compression = Uncompressed()
    """Compression of what workers push: none, bf16, int8, int4, e3m0 or top_k."""
    pulls: Literal["exact", "bf16", "int8"] = "exact"
    """Parameters that workers pull: exact; bf16, rounded to bfloat16 in half the bytes; or int8,
    what has changed since the pull before in a byte a number, with error feedback, where workers
    take steps of their own and wait for each other. Those of the servers are exact in all."""
    engine: Literal["local", "ray", "cluster"] = "local"
    """Engine that starts the processes: local, on this machine; ray, on the nodes of a Ray cluster,
    that of RAY_ADDRESS or a private one; cluster: a launcher such as srun starts them all by one
    command, the run's own first, then the servers, then the workers."""
    resources: str = ""
    """Of each worker under Ray: CPU=4,GPU=1. Empty: one CPU, and one GPU where the cluster has
    some. A server has one CPU."""
    host: str = "127.0.0.1"
    """Address at which the run's own process listens, for workers on other machines: one of this
    machine in a network that you trust. The default is reached from this machine only."""
    port: int = Field(default=0, ge=0, lt=65536)
    """Port of the run's own process; 0: a free one."""
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
        self._check_compression()
        if not self.min_workers <= self.most_workers:
            more = "workers" if splits_rows(self.mode) else "max_workers"
            raise ConfigError(
                f"parallel.min_workers={self.min_workers} is more than the {self.most_workers} "
                f"workers that may compute at the same time. Set parallel.min_workers="
                f"{self.most_workers} at most, or parallel.{more}={self.min_workers}."
            )
        if splits_rows(self.mode) and self.most_workers > self.workers:
            raise ConfigError(
                f"parallel.max_workers={self.max_workers}: under {self.mode.kind} the rows have "
                f"parallel.workers={self.workers} shares, and a further worker would have none. "
                f"Set parallel.workers={self.max_workers}, of which fewer may be there, or "
                f"parallel.max_workers=0."
            )
        if self.needs_all_workers and self.most_workers < self.workers:
            raise ConfigError(
                f"parallel.max_workers={self.max_workers}: each step of {self.mode.kind} needs all "
                f"{self.workers} workers. Set parallel.workers={self.max_workers}, or "
                f"parallel.max_workers=0."
            )
        if self.resources and self.engine != "ray":
            raise ConfigError(
                f"parallel.resources={self.resources} is of parallel.engine=ray, and the engine is "
                f"{self.engine}. Leave it out, or set parallel.engine=ray."
            )
        return self

    def _check_compression(self) -> None:
        kind, mode = self.compress.kind, self.mode
        found = f"parallel.compress.kind={kind}" if kind != "none" else ""
        found = found or (f"parallel.pulls={self.pulls}" if self.pulls != "exact" else "")
        if found and isinstance(mode, Sync):
            value = "parallel.compress.kind=none" if kind != "none" else "parallel.pulls=exact"
            other = "streaming_diloco" if self.pulls == "int8" else "async"
            raise ConfigError(
                f"{found}: parallel.mode.kind=sync takes the steps of one device, which rounded "
                f"numbers do not. Set {value}, or parallel.mode.kind={other}."
            )
        if self.pulls == "int8" and not isinstance(mode, LocalSGD | DiLoCo | StreamingDiLoCo):
            raise ConfigError(
                f"parallel.pulls=int8 sends a worker what has changed since its last pull, and "
                f"under {mode.kind} others push between two of its pulls. Set parallel.pulls=bf16, "
                f"or parallel.mode.kind=streaming_diloco."
            )
        staleness = getattr(mode, "staleness", None)
        if has_feedback(self.compress) and isinstance(staleness, Compensate):
            raise ConfigError(
                f"parallel.compress.kind={kind} pushes parts of older gradients, and "
                f"parallel.mode.staleness.kind=compensate corrects for what has changed since the "
                f"newest. Set parallel.compress.kind=bf16, or parallel.mode.staleness.kind=scale."
            )

    @property
    def needs_all_workers(self) -> bool:
        """Whether each step needs every one of `workers`."""
        return isinstance(self.mode, Sync | StreamingDiLoCo)

    @property
    def needed_workers(self) -> int:
        """Workers without which the run waits."""
        return self.workers if self.needs_all_workers else self.min_workers

    @property
    def most_workers(self) -> int:
        """Workers that compute at the same time."""
        return self.max_workers or self.workers

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
