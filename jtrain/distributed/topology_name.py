"""Names of topologies: `v5e:4x4`, `2*v6e:4x4`, `h100:8`, `2*h100:8`, `cpu:8`."""

import dataclasses
import math
import re

from jtrain.errors import ConfigError

_PATTERN = re.compile(r"(?:([1-9]\d*)\*)?([a-z]\w*):([1-9]\d*(?:x[1-9]\d*)*)")


@dataclasses.dataclass(frozen=True)
class TopologyName:
    """Parts of the name of a topology."""

    count: int
    """Slices of a TPU, or machines with GPUs."""
    kind: str
    dims: tuple[int, ...]
    """Chips of a slice in each direction, or the devices of a machine."""

    @classmethod
    def parse(cls, text: str) -> "TopologyName":
        """Parse `KIND:SHAPE` or `COUNT*KIND:SHAPE`.

        Raises:
            ConfigError: if the text is no name of a topology.
        """
        found = _PATTERN.fullmatch(text)
        if found is None:
            raise ConfigError(
                f"--topology {text} is not a topology: write KIND:SHAPE, such as v5e:4x4, "
                f"2*v5e:4x4 for two slices, h100:8 for a machine of 8 GPUs, or cpu:8."
            )
        return cls(int(found[1] or 1), found[2], tuple(map(int, found[3].split("x"))))

    @property
    def shape(self) -> str:
        """The shape as it is written: `4x4`."""
        return "x".join(map(str, self.dims))

    @property
    def chips(self) -> int:
        """Chips of a slice, or devices of a machine."""
        return math.prod(self.dims)

    def __str__(self) -> str:
        count = f"{self.count}*" if self.count > 1 else ""
        return f"{count}{self.kind}:{self.shape}"
