"""Of processes that stand still, the one that the others wait for."""

from collections.abc import Sequence
from typing import NamedTuple

from jtrain.distributed.heartbeat import WatchedProcess
from jtrain.distributed.heartbeat.heartbeat import ALONE, PHASES
from jtrain.distributed.launcher.worker import WorkerProcess


class Culprit(NamedTuple):
    """Who it is, and why one thinks so."""

    member: WorkerProcess
    words: str


def guilty(members: Sequence[WorkerProcess], watched: Sequence[WatchedProcess]) -> Culprit:
    """The one that is stopped; else, furthest behind; else, where no other is waited for.

    Args:
        watched: what was seen of each.
    """

    def rank(index: int) -> tuple[bool, int, bool, int]:
        beat, stopped = watched[index].beat, watched[index].stopped > 0
        assert beat is not None, "only what was looked at can be late"
        return not stopped, beat.step, beat.phase not in ALONE, PHASES.index(beat.phase)

    order = sorted(range(len(members)), key=rank)
    first = order[0]
    words = "; ".join(_where(members[index], watched[index]) for index in order)
    return Culprit(members[first], words)


def _where(member: WorkerProcess, watched: WatchedProcess) -> str:
    beat = watched.beat
    assert beat is not None, "it was looked at"
    does = {
        "hooks": f"in a hook after step {beat.step}",
        "data": f"waiting for the data of step {beat.step + 1}",
        "step": f"in step {beat.step + 1}",
    }.get(beat.phase, f"in the phase {beat.phase}, step {beat.step}")
    does += f", stopped by a signal for {watched.stopped:.1f} s" if watched.stopped else ""
    allowed = f", of {watched.limit:.1f} s allowed" if watched.late else ""
    return f"process {member.index} has been {does}, for {watched.still:.1f} s{allowed}"
