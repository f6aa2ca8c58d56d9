"""Record of which pushes were applied, so that none is applied twice."""


class Applied:
    """Numbers that were applied, from 1 on: all up to `low`, and some above it."""

    def __init__(self, low: int = 0):
        self.low = low
        self._above: set[int] = set()

    def __contains__(self, number: int) -> bool:
        return number <= self.low or number in self._above

    def __len__(self) -> int:
        return self.low + len(self._above)

    def add(self, number: int) -> None:
        """Record a number."""
        self._above.add(number)
        while self.low + 1 in self._above:
            self.low += 1
            self._above.remove(self.low)
