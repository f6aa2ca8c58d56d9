"""A study small enough to read at a glance, written where a test wants it."""

from pathlib import Path

CODE = '''
from typing import Annotated, Literal

from pydantic import Field

from jtrain.config.top import BaseConfig
from jtrain.config.configclass import configclass


@configclass
class Constant:
    """The same rate throughout."""

    kind: Literal["constant"] = "constant"


@configclass
class Cosine:
    """Down to zero along a half cosine."""

    kind: Literal["cosine"] = "cosine"
    warmup: int = Field(default=0, ge=0)
    """Steps on the way up."""


@configclass
class Sgd:
    """Plain steps downhill."""

    kind: Literal["sgd"] = "sgd"
    lr: float = Field(gt=0)
    """Learning rate."""
    momentum: float = Field(default=0.0, ge=0, lt=1)
    """Share of the last step that is kept."""


@configclass
class Adamw:
    """Adam with decay beside the gradient."""

    kind: Literal["adamw"] = "adamw"
    lr: float = Field(default=1e-3, gt=0)
    """Learning rate."""
    b1: float = Field(default=0.9, ge=0, lt=1)
    """Memory of the mean."""
    schedule: Annotated[Constant | Cosine, Field(discriminator="kind")] = Cosine(warmup=7)
    """How the rate changes."""


@configclass
class Model:
    """A net."""

    width: int = Field(default=32, gt=0)
    """Features."""
    heads: int = Field(default=4, gt=0)
    dropout: float | None = None
    size: int | Literal["auto"] = "auto"
    bias: bool = True
    layers: tuple[int, ...] = ()
    activation: Literal["gelu", "relu"] = "gelu"
    title: str = ""
    scales: dict[str, float] = Field(default_factory=dict)

    def __post_init__(self):
        if self.width % self.heads:
            lower = self.width // self.heads * self.heads
            words = f"width {self.width} is not a multiple of heads, {self.heads}; nearest {lower}"
            raise ValueError(words)


@configclass
class Config(BaseConfig):
    """A toy."""

    optimizer: Annotated[Sgd | Adamw, Field(discriminator="kind")]
    """Who takes the steps."""
    model: Model = Model(width=64)
    """What is trained."""
'''

YAML = """\
experiment: toy
steps: 10
batch: 4
checkpoint:
  every: 5
optimizer:
  kind: adamw
  b1: 0.8
"""


def write_study(directory: Path) -> Path:
    """A directory with experiments/toy.py and configs/toy.yaml; the path of the config."""
    (directory / "experiments").mkdir()
    (directory / "experiments" / "toy.py").write_text(CODE)
    (directory / "configs").mkdir()
    path = directory / "configs" / "toy.yaml"
    path.write_text(YAML)
    return path
