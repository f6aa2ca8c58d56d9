"""Clusters: detection from the environment, and the start of the processes."""

from jtrain.distributed.cluster.cluster import Cluster as Cluster
from jtrain.distributed.cluster.detect import detect as detect
from jtrain.distributed.cluster.rendezvous import start as start
