"""Compression of what workers of a parameter server push: values under `parallel.compress`."""

from typing import Annotated, Literal, TypeAlias

from pydantic import Field

from jtrain.config.configclass import configclass


@configclass
class Uncompressed:
    """Numbers are pushed as they are."""

    kind: Literal["none"] = "none"


@configclass
class BFloat16:
    """Numbers are rounded to bfloat16: 2 bytes each, 2^-9 of each number off at most."""

    kind: Literal["bf16"] = "bf16"


@configclass
class Int8:
    """Numbers are rounded to 255 levels: 1 byte each, and 4 bytes a block.

    The largest magnitude of a block is 127 levels.
    """

    kind: Literal["int8"] = "int8"
    block: int = Field(default=256, ge=1)
    """Numbers that share a scale."""
    feedback: bool = True
    """Error feedback: what rounding has removed is added to the next push."""


@configclass
class Int4:
    """Numbers are rounded to 15 levels: half a byte each, and 4 bytes a block.

    The largest magnitude of a block is 7 levels.
    """

    kind: Literal["int4"] = "int4"
    block: int = Field(default=256, ge=1)
    """Numbers that share a scale."""
    feedback: bool = True
    """Error feedback: what rounding has removed is added to the next push."""


@configclass
class E3M0:
    """Numbers are rounded to powers of two: half a byte each, and 4 bytes a block.

    A sign, three bits of exponent and none of mantissa: 0, and seven powers of two times a scale,
    which is the largest magnitude of a block. The format of the outer gradients of Douillard et al.
    2025, https://arxiv.org/abs/2501.18512; blocks and scales are ours.
    """

    kind: Literal["e3m0"] = "e3m0"
    block: int = Field(default=256, ge=1)
    """Numbers that share a scale."""
    feedback: bool = True
    """Error feedback: what rounding has removed is added to the next push."""


@configclass
class TopK:
    """The largest numbers are pushed, 8 bytes each, and the others are added to the next push.

    Source: Stich et al. 2018, https://arxiv.org/abs/1809.07599.
    """

    kind: Literal["top_k"] = "top_k"
    share: float = Field(default=0.01, gt=0, le=1)
    """Share of the numbers that is pushed, of each server's."""


Compression: TypeAlias = Annotated[
    Uncompressed | BFloat16 | Int8 | Int4 | E3M0 | TopK,
    Field(discriminator="kind"),
]


def has_feedback(compress: Compression) -> bool:
    """Return whether workers keep what compression has removed, and push it later."""
    return isinstance(compress, TopK) or getattr(compress, "feedback", False)
