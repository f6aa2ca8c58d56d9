"""Check of the clock: jumps, and differences from the file server and the other processes."""

import dataclasses
import time
from collections.abc import Iterator

from jtrain.inspect.doctor.finding import Finding, error, ok, warning
from jtrain.io.formatting import format_seconds

JUMP, SKEW = 0.2, 2.0  # seconds
READINGS = 5
FIRST_YEAR = 2025  # jtrain is not older
REMEDY = "sudo systemctl restart chrony || sudo systemctl restart systemd-timesyncd; timedatectl"


@dataclasses.dataclass(frozen=True)
class ClockReading:
    """The wall clock and the monotonic clock at one moment, in seconds."""

    wall: float
    monotonic: float


def read_clock() -> ClockReading:
    """Read both clocks at one moment.

    A busy machine may hold the process up between the two for longer than a jump: of some readings
    the one that took the shortest time counts.
    """

    def read() -> tuple[float, ClockReading]:
        before, wall, after = time.monotonic(), time.time(), time.monotonic()
        return after - before, ClockReading(wall, (before + after) / 2)

    return min((read() for _ in range(READINGS)), key=lambda reading: reading[0])[1]


def check_clock(
    begin: ClockReading,
    end: ClockReading,
    mtime: tuple[float, float, float] | None,
    processes_skew: float = 0.0,
) -> Iterator[Finding]:
    """Return findings about the clocks.

    Args:
        begin: the clocks at the start of the checks, and `end` at their end.
        mtime: the wall clock before a file was created, the file's own time, the clock after.
        processes_skew: the largest difference between the processes, in seconds.
    """
    faults = []
    jump = (end.wall - begin.wall) - (end.monotonic - begin.monotonic)
    if abs(jump) > JUMP:
        faults.append(
            warning(
                "clock",
                "clock-jumps",
                f"the clock was set by {jump:+.1f} s within {end.monotonic - begin.monotonic:.1f} "
                f"s: durations in logs are wrong",
                REMEDY,
            )
        )
    year = time.gmtime(end.wall).tm_year
    if year < FIRST_YEAR:
        faults.append(
            error(
                "clock",
                "clock-year",
                f"the clock says {year}: certificates and downloads fail",
                REMEDY,
            )
        )
    skew = _file_skew(mtime)
    if abs(skew) > SKEW:
        behind = "ahead of" if skew > 0 else "behind"
        faults.append(
            warning(
                "clock",
                "clock-file-server",
                f"files get times {format_seconds(abs(skew))} {behind} this machine's clock",
                f"on the machine whose clock is wrong: {REMEDY}",
            )
        )
    if processes_skew > SKEW:
        faults.append(
            warning(
                "clock",
                "clock-processes",
                f"the clocks of the processes are {format_seconds(processes_skew)} apart",
                f"on each machine: {REMEDY}",
            )
        )
    yield from faults
    if not faults:
        yield ok(
            "clock",
            f"{time.strftime('%Y-%m-%d %H:%M:%S %Z', time.localtime(end.wall))}; it runs steadily, "
            f"and files get the same time",
        )


def _file_skew(mtime: tuple[float, float, float] | None) -> float:
    """Return how far a file's time lies outside the interval in which it was created."""
    if mtime is None:
        return 0.0
    before, file, after = mtime
    return file - after if file > after else min(file - before, 0.0)
