"""Which processes train together: found out from the environment, brought together, compared."""

from jtrain.distributed.cluster.cluster import Cluster as Cluster
from jtrain.distributed.cluster.detect import detect as detect
from jtrain.distributed.cluster.start import start as start
