"""Checkpoints: save, find and restore the states of a run; Orbax is imported on first use."""

from jtrain.checkpoint.init_from import WeightsPlan as WeightsPlan
from jtrain.checkpoint.init_from import plan_weights as plan_weights
from jtrain.checkpoint.manager import CheckpointManager as CheckpointManager
from jtrain.checkpoint.manager import SetAsideError as SetAsideError
from jtrain.checkpoint.retries import SaveRetries as SaveRetries
from jtrain.checkpoint.save_errors import check_writable as check_writable
from jtrain.checkpoint.save_errors import state_bytes as state_bytes
