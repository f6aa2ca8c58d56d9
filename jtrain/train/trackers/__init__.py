"""Trackers: services that take a run's numbers; a tracker is a value with `open(about)`."""

from typing import Annotated, TypeAlias

from pydantic import Field

from jtrain.train.trackers.mlflow import MLflow as MLflow
from jtrain.train.trackers.tensorboard import TensorBoard as TensorBoard
from jtrain.train.trackers.tracker import End as End
from jtrain.train.trackers.tracker import TrackedRun as TrackedRun
from jtrain.train.trackers.tracker import TrackerBackend as TrackerBackend
from jtrain.train.trackers.tracker import TrackerRun as TrackerRun
from jtrain.train.trackers.tracker import check_installed as check_installed
from jtrain.train.trackers.wandb import WandB as WandB

Tracker: TypeAlias = Annotated[TensorBoard | WandB | MLflow, Field(discriminator="kind")]
