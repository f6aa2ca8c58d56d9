"""An MLP under TensorFlow's ParameterServerStrategy and ClusterCoordinator, in processes.

Reads "steps" from each line of its input, schedules as many, joins, and writes the milliseconds
that one took. Its first line of output names the version. Variables and the step of SGD are written
out, for Keras 3 has no ParameterServerStrategy.
"""

import importlib
import itertools
import json
import os
import socket
import subprocess
import sys
import time

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
os.environ["GRPC_FAIL_FAST"] = "use_caller"

import numpy as np

tf = importlib.import_module("tensorflow")  # of another Python than this repository's, perhaps


def free_ports(count: int) -> list[int]:
    """Return ports that are free now."""
    sockets = [socket.socket() for _ in range(count)]
    for each in sockets:
        each.bind(("127.0.0.1", 0))
    ports = [each.getsockname()[1] for each in sockets]
    for each in sockets:
        each.close()
    return ports


def serve(cluster: dict, role: str, index: int) -> None:
    """Serve as a worker or a parameter server until the program that started it is gone."""
    server = tf.distribute.Server(
        tf.train.ClusterSpec(cluster), job_name=role, task_index=index, protocol="grpc"
    )
    parent = os.getppid()
    while server is not None and os.getppid() == parent:
        time.sleep(0.5)


def make_step(given: dict):
    """Return the coordinator and the function that schedules a step."""
    resolver = tf.distribute.cluster_resolver.SimpleClusterResolver(
        tf.train.ClusterSpec(given["cluster"]), rpc_layer="grpc"
    )
    strategy = tf.distribute.ParameterServerStrategy(resolver)
    coordinator = tf.distribute.coordinator.ClusterCoordinator(strategy)
    batch, drop, rate = given["batch"], given["dropout"], given["lr"]
    sizes = [64, *given["widths"], 10]
    draw = np.random.default_rng(0)
    with strategy.scope():
        weights = [
            (
                tf.Variable((draw.normal(size=(a, b)) / a**0.5).astype(np.float32)),
                tf.Variable(tf.zeros(b)),
            )
            for a, b in itertools.pairwise(sizes)
        ]
    variables = [each for pair in weights for each in pair]
    images = draw.random((1437, 64), np.float32)
    labels = draw.integers(0, 10, 1437, np.int32)

    def make_rows():
        rows = tf.data.Dataset.from_tensor_slices((images, labels))
        rows = rows.shuffle(len(images)).repeat().batch(batch, drop_remainder=True)
        return rows.prefetch(2)

    @tf.function
    def step(rows):
        x, label = next(rows)
        with tf.GradientTape() as tape:
            for number, (w, b) in enumerate(weights):
                x = tf.matmul(x, w) + b
                if number < len(weights) - 1:
                    x = tf.nn.dropout(tf.nn.relu(x), drop)
            losses = tf.nn.sparse_softmax_cross_entropy_with_logits(label, x)
            loss = tf.reduce_mean(losses)
        grads = tape.gradient(loss, variables)
        for variable, grad in zip(variables, grads, strict=True):
            variable.assign_sub(rate * grad)
        return loss

    rows = iter(coordinator.create_per_worker_dataset(make_rows))
    return coordinator, lambda: coordinator.schedule(step, args=(rows,))


def main() -> None:
    """Start the cluster, and serve turns until the input ends."""
    given = json.loads(sys.argv[1])
    if len(sys.argv) > 2:
        serve(given, sys.argv[2], int(sys.argv[3]))
        return
    roles = [("worker", i) for i in range(given["workers"])] + [("ps", 0)]
    addresses = [f"127.0.0.1:{port}" for port in free_ports(len(roles))]
    cluster: dict = {"worker": [], "ps": [], "chief": [f"127.0.0.1:{free_ports(1)[0]}"]}
    for (role, _), address in zip(roles, addresses, strict=True):
        cluster[role].append(address)
    children = [
        subprocess.Popen(
            [sys.executable, __file__, json.dumps(cluster), role, str(index)],
            stderr=subprocess.DEVNULL,
        )
        for role, index in roles
    ]
    try:
        coordinator, schedule = make_step({**given, "cluster": cluster})
        float(schedule().fetch())
        print(f"TensorFlow {tf.__version__}, {given['workers']} workers", flush=True)
        for line in sys.stdin:
            start = time.perf_counter()
            losses = [schedule() for _ in range(int(line))]
            coordinator.join()
            float(losses[-1].fetch())
            print((time.perf_counter() - start) / int(line) * 1e3, flush=True)
    finally:
        for child in children:
            child.kill()


if __name__ == "__main__":
    main()
