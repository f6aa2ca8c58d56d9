"""`jtrain greet WORD`: the verb of another package."""

from collections.abc import Sequence


def main(argv: Sequence[str]) -> int:
    print("hello", *argv)
    return 3
