"""Resident memory beyond the arrays while a published model is read into several devices.

A random Llama of 1.3 GB in five safetensors files, read as `model.from` reads it: every parameter
is split over the CPU devices along its longest dim. A thread samples the memory of the process
each millisecond, anonymous memory and pages of files. Beyond the arrays is what exceeds the memory
before and the bytes of the arrays that were read or are being read. The bar is the largest
tensor: 131 MB.

    python benchmarks/reading_weights.py [--rounds 5] [--devices 4] [--layers 16]
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from statistics import median

MB = 1e6


def write_model(folder: Path, layers: int) -> None:
    """Write a random Llama."""
    import numpy as np

    from jtrain.models.pretrained.families import family_of
    from jtrain.models.pretrained.tensors_table import model_shapes
    from jtrain.models.pretrained.write import write_folder
    from jtrain.models.transformer import Transformer

    model = Transformer(
        preset="smollm2-135m", vocab=32_000, context=512, layers=layers, width=1024, heads=16,
        kv_heads=16, hidden=4096, tied=False,
    )  # fmt: skip
    shapes, rng = model_shapes(model), np.random.default_rng(0)
    read = lambda name: rng.standard_normal(shapes[name].shape, np.float32)
    write_folder(folder, family_of(model), model, read, shard=300_000_000)


def resident() -> float:
    """Return the resident memory of this process in MB: anonymous, and pages of files."""
    lines = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return sum(int(lines[name].split()[0]) * 1024 / MB for name in ("RssAnon", "RssFile"))


def measure(folder: Path, devices: int) -> dict[str, float]:
    """Read the model in this process; return the largest tensor and memory in MB."""
    import jax
    import numpy as np
    from jax.sharding import NamedSharding, PartitionSpec

    from jtrain.models.pretrained.source import PretrainedWeights

    mesh = jax.make_mesh((devices,), ("fsdp",))
    source = PretrainedWeights(folder)

    def wanted(leaf: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
        spec = ["fsdp" if n == max(leaf.shape) else None for n in leaf.shape]
        spec = [*spec[: spec.index("fsdp") + 1]]  # of a square the first dim alone
        sharding = NamedSharding(mesh, PartitionSpec(*spec))
        return jax.ShapeDtypeStruct(leaf.shape, np.float32, sharding=sharding)

    jax.block_until_ready(jax.device_put(np.zeros(devices), NamedSharding(mesh, PartitionSpec())))
    before, size, done = resident(), [0.0], threading.Event()
    beyond = []

    def sample() -> None:
        while not done.is_set():
            now = resident()
            beyond.append(now - before - size[0])
            time.sleep(0.001)

    thread = threading.Thread(target=sample)
    thread.start()
    arrays = {}
    for name, leaf in source.found.items():
        size[0] += leaf.size * 4 / MB
        arrays |= source.read({name: wanted(leaf)})
    done.set()
    thread.join()
    end = resident() - before - size[0]
    largest = max(array.nbytes for array in arrays.values()) / MB
    return {"arrays": size[0], "largest": largest, "peak": max(beyond), "end": end}


def main() -> None:
    """Print the medians."""
    parser = argparse.ArgumentParser(
        description="Memory beyond the arrays of a model that is read."
    )
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--devices", type=int, default=4)
    parser.add_argument("--layers", type=int, default=16)
    parser.add_argument("--json", action="store_true", help="the numbers of each round")
    parser.add_argument("--folder", type=Path, help="read this model in this process")
    given = parser.parse_args()
    if given.folder:
        print(json.dumps(measure(given.folder, given.devices)))
        return
    flags = f"--xla_force_host_platform_device_count={given.devices}"
    environment = {**os.environ, "JAX_PLATFORMS": "cpu", "XLA_FLAGS": flags}
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch) / "model"
        write_model(folder, given.layers)
        command = [
            sys.executable,
            __file__,
            "--folder",
            str(folder),
            "--devices",
            f"{given.devices}",
        ]
        found = []
        for _ in range(given.rounds):
            run = subprocess.run(command, env=environment, check=True, capture_output=True)
            found.append(json.loads(run.stdout.splitlines()[-1]))
    if given.json:
        print(json.dumps(found))
        return
    print("| | MB, median | smallest .. largest |\n|---|---:|---:|")
    for name in found[0]:
        values = [one[name] for one in found]
        print(f"| {name} | {median(values):.0f} | {min(values):.0f} .. {max(values):.0f} |")


if __name__ == "__main__":
    main()
