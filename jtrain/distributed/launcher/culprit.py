"""Culprit of a hang: the stuck process that the others wait for."""

from collections.abc import Sequence
from typing import NamedTuple

from jtrain.distributed.heartbeat import WatchedProcess
from jtrain.distributed.heartbeat.heartbeat import ALONE, PHASES
from jtrain.distributed.launcher.worker import WorkerProcess


class Culprit(NamedTuple):
    """The culprit, and the status of all processes as evidence."""

    worker: WorkerProcess
    text: str


def find_culprit(workers: Sequence[WorkerProcess], watched: Sequence[WatchedProcess]) -> Culprit:
    """Return the process that is stopped; else furthest behind; else in a phase without peers.

    Args:
        watched: the observations of each process.
    """

    def rank(index: int) -> tuple[bool, int, bool, int]:
        beat, stopped = watched[index].beat, watched[index].stopped > 0
        assert beat is not None, "only an observed process can be late"
        return not stopped, beat.step, beat.phase not in ALONE, PHASES.index(beat.phase)

    order = sorted(range(len(workers)), key=rank)
    first = order[0]
    text = "; ".join(_status(workers[index], watched[index]) for index in order)
    return Culprit(workers[first], text)


def _status(worker: WorkerProcess, watched: WatchedProcess) -> str:
    beat = watched.beat
    assert beat is not None, "the process was observed"
    activity = {
        "hooks": f"in a hook after step {beat.step}",
        "data": f"waiting for the data of step {beat.step + 1}",
        "step": f"in step {beat.step + 1}",
    }.get(beat.phase, f"in the phase {beat.phase}, step {beat.step}")
    activity += f", stopped by a signal for {watched.stopped:.1f} s" if watched.stopped else ""
    allowed = f", of {watched.limit:.1f} s allowed" if watched.late else ""
    return f"process {worker.index} has been {activity}, for {watched.still:.1f} s{allowed}"
