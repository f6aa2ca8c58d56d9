"""Which processes train together: found out from the environment, brought together, compared."""

from jtrain.cluster.cluster import Cluster as Cluster
from jtrain.cluster.detect import detect as detect
from jtrain.cluster.start import start as start
