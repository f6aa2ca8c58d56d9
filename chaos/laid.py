"""One process of a run under a layout: KIND DEVICES EACH STOP, in the current directory.

It records a digest of every row that it reads, and saves again each state that it restores.
"""

import json
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

SEEN = "seen-{}-{}.jsonl"
"""Rows read by a process: a line [step, {row: digest}] per batch; part `first` or `then`."""
RUN = Path("runs") / "laid"
AGAIN = Path("again")
"""The checkpoints of the restored states."""
STEPS = 50


def main(kind: str, devices: str, each: str, stop: str) -> None:
    """Train under a layout until after step `stop`; to the end if `stop` is 0."""
    from chaos import subject
    from jtrain.config.top import CheckpointConfig, EvaluateConfig
    from jtrain.core.loop import Hook, Stop
    from jtrain.parallel import FSDP, Axes, Mirrored, Single
    from jtrain.train.run import run

    class StopAt(Hook):
        every = int(stop)

        def on_state(self, step: int, state: Any) -> Stop:
            return Stop("requested")

    parallel = {
        "single": Single(),
        "data": Mirrored(devices=int(each)),
        "fsdp": FSDP(devices=int(each), min_size=0),
        "tensor": Axes(devices=int(each), fsdp=1, tensor=int(devices)),
    }[kind]
    _record_rows("first" if int(stop) else "then")
    _save_again()
    run(
        subject.config(
            name=RUN.name,
            steps=STEPS,
            parallel=parallel,
            checkpoint=CheckpointConfig(every=0),
            evaluate=EvaluateConfig(every=25),
        ),
        hooks=[StopAt()] if int(stop) else [],
    )


def _record_rows(part: str) -> None:
    from jtrain.data.batches.fingerprint import digest_batch
    from jtrain.train.hooks.step_record import StepRecorder

    observe = StepRecorder.observe
    path = Path(SEEN.format(part, os.environ["JTRAIN_PROCESS"]))
    path.unlink(missing_ok=True)

    def observe_and_record(
        self: StepRecorder, first: int, batches: Sequence[Mapping[str, Any]]
    ) -> None:
        for step, batch in enumerate(batches, first + 1):
            rows = {
                int(row): digest_batch({name: array[place] for name, array in batch.items()})
                for place, row in enumerate(batch["row"])
            }
            with path.open("a") as file:
                file.write(json.dumps([step, rows]) + "\n")
        observe(self, first, batches)

    StepRecorder.observe = observe_and_record


def _save_again() -> None:
    from jtrain.checkpoint import CheckpointManager

    restore = CheckpointManager.restore

    def restore_and_save(self: CheckpointManager, step: int, abstract: Any, **options: bool) -> Any:
        state = restore(self, step, abstract, **options)
        with CheckpointManager(AGAIN) as copy:
            copy.save(step, state, {})
        return state

    CheckpointManager.restore = restore_and_save


if __name__ == "__main__":
    main(*sys.argv[1:])
