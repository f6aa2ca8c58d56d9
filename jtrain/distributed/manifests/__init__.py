"""Manifests: a run on the machines of a topology, as other programs start it."""

from jtrain.distributed.manifests.kubernetes import ClusterJob as ClusterJob
from jtrain.distributed.manifests.kubernetes import job_set as job_set
from jtrain.distributed.manifests.kubernetes import to_label as to_label
from jtrain.distributed.manifests.kubernetes import train_job as train_job
from jtrain.distributed.manifests.machines import Machines as Machines
from jtrain.distributed.manifests.machines import find_machines as find_machines
from jtrain.distributed.manifests.sky_task import sky_task as sky_task
