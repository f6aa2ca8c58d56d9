"""Checkpoints: save, find and restore the states of a run; Orbax is imported on first use."""

from jtrain.checkpoint.disk_space import bytes_of as bytes_of
from jtrain.checkpoint.disk_space import check_writable as check_writable
from jtrain.checkpoint.init_from import WeightsPlan as WeightsPlan
from jtrain.checkpoint.init_from import starting as starting
from jtrain.checkpoint.manager import CheckpointManager as CheckpointManager
from jtrain.checkpoint.manager import SetAsideError as SetAsideError
from jtrain.checkpoint.retries import SaveRetries as SaveRetries
