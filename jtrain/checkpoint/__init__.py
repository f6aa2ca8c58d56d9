"""Save, find and restore the states of a run; Orbax is imported by the first save or restore."""

from jtrain.checkpoint.checkpoints import Checkpoints as Checkpoints
from jtrain.checkpoint.checkpoints import SetAsideError as SetAsideError
from jtrain.checkpoint.retries import Retries as Retries
from jtrain.checkpoint.space import bytes_of as bytes_of
from jtrain.checkpoint.space import check_writable as check_writable
from jtrain.checkpoint.starting import Start as Start
from jtrain.checkpoint.starting import starting as starting
