"""The verdict of a comparison, float64 deciding what float32 leaves open."""

from collections.abc import Callable

from jtrain.testing.report import Row
from jtrain.testing.result import Distances
from jtrain.testing.why_rows import Cause

# What is allowed, relative. Adding some thousand numbers in another order moves the last of
# float32's 24 bits (6e-8) a few times, and the last of float64's 53 (1e-16) as often; a fault moves
# both alike, so that anything between 1e-12 and 1e-6 tells them apart.
SINGLE, DOUBLE = 1e-6, 1e-12


def judged(
    check: str, single: Distances, double: Distances | None, why: Callable[[], Cause]
) -> Row:
    """The row of a comparison; `why` is asked where it fails."""
    far = single.largest > SINGLE if double is None else double.largest > DOUBLE
    if not far:
        verdict = "ok" if single.largest <= SINGLE else "rounding"
        return Row(check, verdict, single, double)
    cause = why()
    verdict = "FAILS" if cause.fault else "named"
    return Row(check, verdict, single, double, cause.why, cause.name)
