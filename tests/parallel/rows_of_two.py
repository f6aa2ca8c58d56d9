"""One of two processes whose devices alternate in the mesh: PORT INDEX. Not a test itself."""

import os
import sys

if __name__ == "__main__":
    os.environ["JAX_PLATFORMS"] = "cpu"
    os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=2"

import jax
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from jtrain.parallel.strategies.sharded import Sharded


def main(port: str, index: int) -> None:
    """Place half of a batch, and expect the rows in order."""
    where = f"127.0.0.1:{port}"
    jax.distributed.initialize(where, 2, index, coordinator_bind_address=where)
    by_process = sorted(jax.devices(), key=lambda device: (device.process_index, device.id))
    ordered = np.array(by_process)[[0, 2, 1, 3]]
    strategy = Sharded(Mesh(ordered, ("fsdp",), axis_types=(AxisType.Auto,)))
    assert strategy.part == (index, 2)
    rows = np.arange(16, dtype=np.float32).reshape(8, 2)
    own = rows[4 * index : 4 * index + 4]
    whole = NamedSharding(strategy.mesh, PartitionSpec())
    for stacked in (False, True):
        placed = strategy.place({"x": own[None] if stacked else own}, stacked=stacked)["x"]
        assert placed.sharding.mesh == strategy.mesh
        full = jax.jit(lambda x: x, out_shardings=whole)(placed).addressable_data(0)
        np.testing.assert_array_equal(full[0] if stacked else full, rows)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
