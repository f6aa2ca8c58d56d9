"""Stand-in for `jtrain run CONFIG KEY=VALUE ...`: it writes the files of a run without training.

The loss is lr x 1000 + seed / 100. A member of lr 9 fails, one of lr 6 crashes; one of lr 8
goes on until it is stopped, one of lr 5 ends by the signal, as any program that has just begun.
"""

import json
import os
import signal
import sys
import time
from pathlib import Path

config, *settings = sys.argv[1:]
said = dict(setting.split("=", 1) for setting in settings)
place = Path("runs") / said["name"]
place.mkdir(parents=True, exist_ok=True)
lr, seed = float(said.get("optimizer.lr", 1e-3)), int(said.get("seed", 0))
if lr == 5 and not Path("go-on").exists():  # its handler is not installed yet
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    Path("waiting").touch()
    time.sleep(60)

lines = [f"base: {os.path.relpath(config, place)}", f"name: {said.pop('name')}"]
optimizer = [
    f"  {k.partition('.')[2]}: {said.pop(k)}" for k in [*said] if k.startswith("optimizer.")
]
lines += [f"{key}: {value}" for key, value in said.items()]
lines += ["optimizer:", *optimizer] if optimizer else []
(place / "config.yaml").write_text("\n".join(lines) + "\n")


def stands(status: str, **facts) -> None:
    here = sorted(os.sched_getaffinity(0))
    flags = os.environ.get("XLA_FLAGS"), os.environ.get("CUDA_VISIBLE_DEVICES")
    times = {"begun": begun, "ended": time.time()}
    said = {"status": status, "cores": here, "environment": flags, **times, **facts}
    (place / "run.json").write_text(json.dumps(said))


def stop(*_) -> None:
    stands("stopped", step=5)
    sys.exit(75)


begun = time.time()
signal.signal(signal.SIGINT, stop)
stands("running")
with (place / "tries.txt").open("a") as tries:
    tries.write("x")
if lr == 8 and not Path("go-on").exists():
    Path("waiting").touch()
    time.sleep(60)
if lr == 9:
    stands("failed", why="no step from 1 to 2 was finite")
    sys.exit(70)
if lr == 6:
    stands("crashed", why="OSError: [Errno 5] Input/output error")
    print("Traceback ...\nOSError: [Errno 5] Input/output error", file=sys.stderr)
    sys.exit(70)
if lr == 7:
    sys.exit("experiments/quick.py: something is wrong with 7")
if "MEET" in os.environ:  # somebody who runs beside this one
    Path("met").mkdir(exist_ok=True)
    Path("met", place.name).touch()
    while len(os.listdir("met")) < 2 and time.time() < begun + 60:
        time.sleep(0.02)
rows = [
    {"step": s, "valid/loss": lr * 1000 + seed / 100 + 6 / s, "valid/rows": 50} for s in (6, 12)
]
(place / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
stands("done", step=12, sets=["valid"])
