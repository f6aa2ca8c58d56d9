"""One of several processes that go back together: no arguments. Not a test itself.

The fault lies in a row that the second process reads: what each of them decides is by the whole
batch. What became of each run is written for each process.
"""

import json
import os
from pathlib import Path

from chaos.numbers import Fault, config
from jtrain.config.sections import RollbackPolicy, Spike, StopPolicy
from jtrain.parallel import FSDP, Mirrored
from jtrain.train.run import run

NAN = (Fault(batch=6, place="gradient up", row=13),)
BIG = (Fault(batch=8, place="total of the loss", value="1e4", row=13),)
SPIKE = Spike(loss=3.0, memory=4)
SPLIT, WHOLE = {"parallel": FSDP(min_size=0)}, {"parallel": Mirrored()}
RUNS = {
    "nan": config("nan", NAN, RollbackPolicy(back=3, skip=4), **SPLIT),
    "no-nan": config("no-nan", NAN, RollbackPolicy(without=((3, 7),)), **SPLIT),
    "spike": config("spike", BIG, RollbackPolicy(spike=SPIKE), **WHOLE),
    "no-spike": config("no-spike", BIG, RollbackPolicy(spike=SPIKE, without=((8, 9),)), **WHOLE),
    "stops": config("stops", NAN, StopPolicy(), **SPLIT),
}


def main() -> None:
    """Train all steps."""
    ends = {}
    with open(os.devnull, "w") as nowhere:
        for name, each in RUNS.items():
            outcome = run(each, screen=nowhere)
            ends[name] = [outcome.status, outcome.step, outcome.why]
    Path(f"ends-{os.environ['JTRAIN_PROCESS']}.json").write_text(json.dumps(ends))


if __name__ == "__main__":
    main()
