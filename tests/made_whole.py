"""What a compiler says of arrays that it makes whole on their way from one split to another."""

from collections.abc import Iterable


def made_whole(said: Iterable[str]) -> list[str]:
    """The lines in which it warns that it knows no way from one split to another.

    Without those about a `fake_parameter`: it is of a product that XLA splits for trial, to learn
    what that would cost, and in no program.
    """
    warns = [line for line in said if "Involuntary full rematerialization" in line]
    return [line for line in warns if "HLO operation %fake_parameter" not in line]
