"""Nodes of a job in a cloud, a process for each: SkyPilot, AWS Batch."""

import socket

from jtrain.distributed.cluster.cluster import PORT, Cluster, CoordinatorAddress
from jtrain.distributed.cluster.variables import ClusterVariables
from jtrain.errors import ConfigError


def read_sky_pilot(env: ClusterVariables) -> Cluster:
    """Read the nodes of a SkyPilot task, with one process per node."""
    hosts, nodes = env.text("SKYPILOT_NODE_IPS").split(), env.number("SKYPILOT_NUM_NODES")
    if len(hosts) != nodes:
        raise ConfigError(
            f"SKYPILOT_NUM_NODES={nodes}, and SKYPILOT_NODE_IPS has {len(hosts)} addresses "
            f"({', '.join(hosts)}). Set both to the values of the task, or unset both to run in "
            f"one process."
        )
    return Cluster(
        kind="SkyPilot",
        processes=nodes,
        index=env.number("SKYPILOT_NODE_RANK"),
        coordinator=CoordinatorAddress(hosts[0], PORT),
        by=env.used,
    )


def read_aws_batch(env: ClusterVariables) -> Cluster:
    """Read a multi-node parallel job of AWS Batch: its main node is process 0.

    The main node alone has no address of the main node. Source:
    https://docs.aws.amazon.com/batch/latest/userguide/mnp-env-vars.html.
    """
    nodes, node = env.number("AWS_BATCH_JOB_NUM_NODES"), env.number("AWS_BATCH_JOB_NODE_INDEX")
    index = (node - env.number("AWS_BATCH_JOB_MAIN_NODE_INDEX", 0)) % max(nodes, 1)
    address = "AWS_BATCH_JOB_MAIN_NODE_PRIVATE_IPV4_ADDRESS"
    host = env.text(address) if index else env.get(address) or socket.gethostname()
    return Cluster(
        kind="AWS Batch",
        processes=nodes,
        index=index if node < nodes else node,
        coordinator=CoordinatorAddress(host, PORT),
        by=env.used,
    )
