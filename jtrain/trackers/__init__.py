"""Trackers: values with `open(about)`, which gives what writes a run's numbers into a service."""

from typing import Annotated, TypeAlias

from pydantic import Field

from jtrain.trackers.mlflow import MLflow as MLflow
from jtrain.trackers.tensorboard import TensorBoard as TensorBoard
from jtrain.trackers.tracker import About as About
from jtrain.trackers.tracker import End as End
from jtrain.trackers.tracker import Opens as Opens
from jtrain.trackers.tracker import Writer as Writer
from jtrain.trackers.tracker import check_installed as check_installed
from jtrain.trackers.wandb import WandB as WandB

Tracker: TypeAlias = Annotated[TensorBoard | WandB | MLflow, Field(discriminator="kind")]
