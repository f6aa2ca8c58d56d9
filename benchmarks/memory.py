"""Growth of memory after imports over a script written by hand: a transformer of 50 M parameters.

Peak resident memory of a process, less what it had after its imports. Both clip by the global norm
and step AdamW a few times on the plays of Shakespeare. No checkpoint is in it: one is a copy of the
state on the host, whoever makes it.

    python benchmarks/memory.py [--rounds 3] [--steps 3]
"""

import argparse
import json
import os
import resource
import subprocess
import sys
import tempfile
from pathlib import Path

from pairs import machine, ratio, table, take_turns

SIZES = {"context": 128, "layers": 10, "heads": 10, "width": 640}
BATCH, CLIP = 8, 1.0


def train_ours(steps: int) -> None:
    """Run jtrain in this process and print the growth of its memory."""
    import io

    from jtrain.config.resolve import resolve
    from jtrain.models.networks import decoder
    from jtrain.train.run import run

    assert decoder  # what the model needs is an import, not memory of it
    settings = [
        f"steps={steps}",
        f"batch={BATCH}",
        f"data.context={SIZES['context']}",
        *(f"model.{name}={size}" for name, size in SIZES.items()),
        "optimizer.schedule={kind: constant}",
        "name=memory",
        "parallel={kind: single}",
        "evaluate.every=0",
        "checkpoint.every=0",
    ]
    config = resolve(Path("configs/shakespeare.yaml"), settings).config
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    run(config, screen=io.StringIO(), hooks=[Enough(steps, before)])


def Enough(steps: int, before: int):  # noqa: N802  reads as a hook
    """Print the growth of memory when the last step is done, and end the process."""
    from jtrain.train.hooks import on_numbers

    def tell(step, numbers):
        del numbers
        if step == steps:
            grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
            print(json.dumps({"grown": grown}), flush=True)
            os._exit(0)

    return on_numbers(tell)


def megabytes(command: list[str], there: str) -> float:
    """Return the growth that a process prints."""
    shown = {**os.environ, "JAX_PLATFORMS": "cpu"}
    got = subprocess.run(
        command, cwd=there, env=shown, check=True, stdout=subprocess.PIPE, text=True
    )
    return json.loads(got.stdout.splitlines()[-1])["grown"] / 1024


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description="Growth of memory over a script by hand.")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--ours", action="store_true", help="train in this process")
    given = parser.parse_args()
    if given.ours:
        return train_ours(given.steps)
    here = Path(__file__).parent
    setting = json.dumps({"sizes": SIZES, "batch": BATCH, "steps": given.steps, "clip": CLIP})
    commands = {
        "by hand": [sys.executable, str(here / "peers" / "by_hand.py"), setting],
        "jtrain": [sys.executable, str(here / "memory.py"), "--ours", f"--steps={given.steps}"],
    }
    print(machine())
    with tempfile.TemporaryDirectory() as there:
        for name in ("configs", "experiments"):
            (Path(there) / name).symlink_to((here.parent / name).resolve())
        times = take_turns(
            {n: lambda c=c: megabytes(c, there) for n, c in commands.items()},
            given.rounds,
            warmup=0,
        )
    print(f"\n{table(times, 'MB', 'by hand')}\n\nratio: {ratio(times['jtrain'], times['by hand'])}")
    return None


if __name__ == "__main__":
    main()
