"""Modes of a parameter server, and the compression of what its workers push."""

from typing import Annotated, Literal, TypeAlias

from pydantic import Field

from jtrain.config.configclass import configclass


@configclass
class Sync:
    """The step of one device: each worker takes a share of the rows, and all wait for all.

    Backup workers: Chen et al. 2016, https://arxiv.org/abs/1604.00981.
    """

    kind: Literal["sync"] = "sync"
    backups: int = Field(default=0, ge=0)
    """Slowest workers of each step that are not waited for. Their rows are left out of the step,
    and the gradient is divided by the weight of the others."""


@configclass
class Apply:
    """Every gradient is applied as it is, however old its parameters were."""

    kind: Literal["apply"] = "apply"


@configclass
class Scale:
    """A gradient of staleness t is divided by 1 + t.

    Source: Zhang et al. 2015, https://arxiv.org/abs/1511.05950, whose divisor is t from 1 on.
    """

    kind: Literal["scale"] = "scale"


@configclass
class Drop:
    """A gradient that is too stale is dropped, and its rows with it."""

    kind: Literal["drop"] = "drop"
    limit: int = Field(ge=0)
    """Largest staleness of a gradient that is applied."""


@configclass
class Compensate:
    """A gradient g of parameters w, applied at v, becomes g + strength x g x g x (v - w).

    Source: Zheng et al. 2017, https://arxiv.org/abs/1609.08326.
    """

    kind: Literal["compensate"] = "compensate"
    strength: float = Field(default=0.04, gt=0)
    """Factor of the second-order term, lambda in the paper."""


Staleness: TypeAlias = Annotated[
    Apply | Scale | Drop | Compensate,
    Field(discriminator="kind"),
]


@configclass
class Async:
    """Each worker takes whole batches, and its gradients are applied when they come."""

    kind: Literal["async"] = "async"
    staleness: Staleness = Apply()
    """Treatment of a gradient that was computed from older parameters."""


@configclass
class SSP:
    """As async, but no worker is more than some steps ahead of the slowest.

    Source: Ho et al. 2013, "More Effective Distributed ML via a Stale Synchronous Parallel
    Parameter Server", NIPS.
    """

    kind: Literal["ssp"] = "ssp"
    bound: int = Field(ge=0)
    """Largest lead of a worker over the slowest one, in steps of its own: s in the paper. A
    gradient is then at most (2s + 1)(workers - 1) updates old."""
    staleness: Staleness = Apply()
    """Treatment of a gradient that was computed from older parameters."""


@configclass
class LocalSGD:
    """Each worker takes steps of its own, and then the parameters are averaged.

    Source: Stich 2018, https://arxiv.org/abs/1805.09767.
    """

    kind: Literal["local_sgd"] = "local_sgd"
    inner_steps: int = Field(ge=1)
    """Steps of a worker between two averages."""


@configclass
class DiLoCo:
    """As local_sgd, but the mean change is the gradient of an outer Nesterov step.

    Source: Douillard et al. 2023, https://arxiv.org/abs/2311.08105: 500 steps of AdamW between two
    outer steps at rate 0.7 and momentum 0.9.
    """

    kind: Literal["diloco"] = "diloco"
    inner_steps: int = Field(default=500, ge=1)
    """Steps of a worker between two outer steps."""
    lr: float = Field(default=0.7, gt=0)
    """Learning rate of the outer step."""
    momentum: float = Field(default=0.9, ge=0, lt=1)
    """Nesterov momentum of the outer step."""


@configclass
class StreamingDiLoCo:
    """As diloco, but parts of the parameters are synchronized one by one, while workers go on.

    Source: Douillard et al. 2025, https://arxiv.org/abs/2501.18512, with the constants of its
    experiments. The paper pushes four bits a number: `parallel.compress.kind=e3m0`.
    """

    kind: Literal["streaming_diloco"] = "streaming_diloco"
    inner_steps: int = Field(default=100, ge=1)
    """Steps of a worker between two outer steps of the same fragment."""
    fragments: int = Field(default=0, ge=0)
    """Parts of the parameters, in each of which the layers are as far apart as there are parts; 0:
    one for every three layers."""
    overlap: int = Field(default=1, ge=0)
    """Steps that a worker takes between the push of a fragment and the merge with the outer step,
    tau in the paper; 0: it waits."""
    alpha: float = Field(default=0.5, ge=0, lt=1)
    """Share of the worker's own parameters in a merge. Without overlap it has no effect: workers
    then begin from the outer step."""
    lr: float = Field(default=0.4, gt=0)
    """Learning rate of the outer step."""
    momentum: float = Field(default=0.9, ge=0, lt=1)
    """Nesterov momentum of the outer step."""


@configclass
class AsyncDiLoCo:
    """As diloco, but no worker waits for another: each push is an outer step of its own.

    Source: Liu et al. 2024, https://arxiv.org/abs/2401.09135: delayed Nesterov momentum.
    """

    kind: Literal["async_diloco"] = "async_diloco"
    inner_steps: int = Field(default=50, ge=1)
    """Steps of a lease, on a share of the rows."""
    lr: float = Field(default=0.7, gt=0)
    """Learning rate of the outer step."""
    momentum: float = Field(default=0.9, ge=0, lt=1)
    """Nesterov momentum of the outer step."""
    delay: int = Field(default=0, ge=0)
    """Pushes between two updates of the momentum, N in the paper; each moves the parameters by 1/N
    of its change. 0: as many as there are workers."""


Mode: TypeAlias = Annotated[
    Sync | Async | SSP | LocalSGD | DiLoCo | StreamingDiLoCo | AsyncDiLoCo,
    Field(discriminator="kind"),
]


def splits_rows(mode: Mode) -> bool:
    """Return whether the rows of a batch are split over the workers."""
    return not isinstance(mode, Async | SSP)


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
