"""Types for the signatures of an experiment: `jt.types.Params`, `jt.types.Batch`."""

from jtrain.core.placement import Placement as Placement
from jtrain.core.types import Batch as Batch
from jtrain.core.types import Dims as Dims
from jtrain.core.types import Extra as Extra
from jtrain.core.types import Key as Key
from jtrain.core.types import Keys as Keys
from jtrain.core.types import LossFn as LossFn
from jtrain.core.types import LossValue as LossValue
from jtrain.core.types import Metrics as Metrics
from jtrain.core.types import Params as Params
from jtrain.core.types import RowsInteract as RowsInteract
from jtrain.io.lazy_names import lazy_names

_, __dir__ = lazy_names(__name__)
