"""Weights & Biases tracker, online or into files that are synced later."""

import importlib
from collections.abc import Mapping
from typing import ClassVar, Literal

from jtrain.config.configclass import configclass
from jtrain.errors import ConfigError
from jtrain.train.trackers.tracker import End, TrackedRun


@configclass
class WandB:
    """A run at wandb.ai, or at your own server; `pip install 'jtrain[wandb]'`."""

    kind: Literal["wandb"] = "wandb"
    project: str = "jtrain"
    """W&B project of the run."""
    entity: str = ""
    """User or team of the project; empty: the user who is logged in."""
    mode: Literal["online", "offline"] = "online"
    """`offline` writes runs/NAME/wandb, which `wandb sync` sends later."""

    package: ClassVar[str] = "wandb"

    def open(self, about: TrackedRun) -> "_WandBRun":
        """Start a run, or resume one.

        Raises:
            ConfigError: if the mode is online and nobody is logged in.
        """
        wandb = importlib.import_module("wandb")
        if self.mode == "online" and not wandb.api.api_key:  # wandb would prompt and wait
            raise ConfigError(
                "nobody is logged in to wandb. Type: wandb login, or write files that are synced "
                "later: trackers=[{kind: wandb, mode: offline}]"
            )
        return _WandBRun(
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


class _WandBRun:
    def __init__(self, run):
        self.id, self._run = run.id, run

    def write(self, step: int, numbers: Mapping[str, float]) -> None:
        self._run.log(dict(numbers), step=step)

    def close(self, end: End) -> None:
        self._run.finish(exit_code=int(end == "failed"))
