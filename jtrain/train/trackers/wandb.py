"""Weights & Biases, over the network or into files that are sent later."""

import importlib
from collections.abc import Mapping
from typing import ClassVar, Literal

from jtrain.config.configclass import configclass
from jtrain.errors import ConfigError
from jtrain.train.trackers.tracker import End, TrackedRun


@configclass
class WandB:
    """A run at wandb.ai, or at a server of your own; `pip install 'jtrain[wandb]'`."""

    kind: Literal["wandb"] = "wandb"
    project: str = "jtrain"
    """What the run is filed under."""
    entity: str = ""
    """The user or team it belongs to; empty: whoever is logged in."""
    mode: Literal["online", "offline"] = "online"
    """`offline` writes runs/NAME/wandb, which `wandb sync` sends later."""

    package: ClassVar[str] = "wandb"

    def open(self, about: TrackedRun) -> "_Run":
        """Begins a run, or goes on with one.

        Raises:
            ConfigError: if it is to be online and nobody is logged in.
        """
        wandb = importlib.import_module("wandb")
        if self.mode == "online" and not wandb.api.api_key:  # it would ask, and wait for an answer
            raise ConfigError(
                "nobody is logged in. Type: wandb login, or write files that are sent later: "
                "trackers=[{kind: wandb, mode: offline}]"
            )
        return _Run(
            wandb.init(
                project=self.project,
                entity=self.entity or None,
                mode=self.mode,
                name=about.name,
                id=about.id or None,
                resume="allow" if about.id else None,
                dir=str(about.directory),
                config=dict(about.config),
                settings=wandb.Settings(console="off", silent=True),
                reinit="create_new",
            )
        )


class _Run:
    def __init__(self, run):
        self.id, self._run = run.id, run

    def write(self, step: int, numbers: Mapping[str, float]) -> None:
        self._run.log(dict(numbers), step=step)

    def close(self, end: End) -> None:
        self._run.finish(exit_code=int(end == "failed"))
