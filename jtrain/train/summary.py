"""Summary of a run: its leaves, their bytes on a device, the FLOPs of a step."""

import dataclasses
import math
from collections.abc import Iterator
from typing import Any

import jax

from jtrain.core.flops import count_flops
from jtrain.core.loss import combine, normalize_loss
from jtrain.core.pytree import named_leaves
from jtrain.core.state import TrainState
from jtrain.io.formatting import align_columns, format_bytes, format_count
from jtrain.parallel.offload import device_shardings
from jtrain.train.setup import TrainSetup


@dataclasses.dataclass(frozen=True)
class LeafSize:
    """Size of a leaf of the parameters."""

    name: str
    shape: tuple[int, ...]
    shard: tuple[int, ...]
    """Shape of the shard on one device."""
    dtype: str
    numbers: int
    bytes: int
    device_bytes: int


@dataclasses.dataclass(frozen=True)
class StateBytes:
    """Bytes of a part of the state: in total, and on one device."""

    total: int
    device: int


@dataclasses.dataclass(frozen=True)
class Summary:
    """Sizes of a run, computed without allocating it."""

    leaves: tuple[LeafSize, ...]
    """Leaves of the parameters, in the order of their tree."""
    params: StateBytes
    extra: StateBytes
    optimizer: StateBytes

    @property
    def numbers(self) -> int:
        """Number of parameters."""
        return sum(leaf.numbers for leaf in self.leaves)

    @property
    def device_bytes(self) -> int:
        """Bytes of the state on one device."""
        return self.params.device + self.extra.device + self.optimizer.device


def summarize(like: TrainState) -> Summary:
    """Return the sizes of a state, given as shapes, dtypes and shardings."""
    leaves = tuple(_leaf(name, leaf) for name, leaf in named_leaves(like.params).items())
    return Summary(leaves, _bytes(like.params), _bytes(like.extra), _bytes(like.opt_state))


def count_step_flops(setup: TrainSetup) -> float | None:
    """Return the FLOPs of loss and gradient over the whole batch; None if unknown.

    `jtrain.core.flops` counts them by tracing, without compiling or using a device. Products in the
    optimizer (Muon's) are not included.

    Raises:
        LossError: if the loss breaks its contract.
        DataError: if the first batch cannot be read.
    """
    x, like = setup.experiment, device_shardings(setup.like)
    terms = normalize_loss(setup.loss, ragged=x.train.ragged)

    def loss(params, extra, batch, key):
        output = terms(params, extra, batch, key)
        return combine(output.terms, [mean.weight for mean in output.terms.means])

    key = jax.eval_shape(TrainState.step_key, like)
    return count_flops(jax.grad(loss), like.params, like.extra, x.train[0], key)


def format_table(sizes: Summary, work: float | None = None) -> str:
    """Return a line for each module and leaf, then the sums, in columns."""
    rows = [("leaf", "shape", "dtype", "numbers", "bytes", "on a device"), *_rows(sizes)]
    return "\n".join([*align_columns(rows, right=(3, 4)), "", *_sums(sizes, work)])


def format_line(sizes: Summary) -> str:
    """Return the sums in one line, for the log of a run."""
    carried = f", {format_bytes(sizes.extra.total)} beside them" if sizes.extra.total else ""
    return (
        f"{len(sizes.leaves)} leaves of {format_bytes(sizes.params.total)}{carried}, "
        f"{format_bytes(sizes.optimizer.total)} of the optimizer; "
        f"a device holds {format_bytes(sizes.device_bytes)} of state"
    )


def to_json_values(sizes: Summary, work: float | None) -> dict[str, Any]:
    """Return the summary as plain numbers, in bytes and FLOPs; `flops` only if known."""
    known = {} if work is None else {"flops": work}
    return {
        "parameters": sizes.numbers,
        "bytes": {
            part: dataclasses.asdict(getattr(sizes, part))
            for part in ("params", "extra", "optimizer")
        },
        "device_bytes": sizes.device_bytes,
        **known,
        "leaves": [dataclasses.asdict(leaf) for leaf in sizes.leaves],
    }


def _rows(sizes: Summary) -> Iterator[tuple[str, ...]]:
    modules: dict[str, list[LeafSize]] = {}
    for leaf in sizes.leaves:
        modules.setdefault(leaf.name.rpartition("/")[0], []).append(leaf)
    for module, leaves in modules.items():
        if module:
            numbers, held = sum(x.numbers for x in leaves), sum(x.bytes for x in leaves)
            yield module, "", "", f"{numbers:,}", format_bytes(held), ""
        for leaf in leaves:
            name = leaf.name.rpartition("/")[2]
            yield (
                f"  {name}" if module else name,
                _dims(leaf.shape),
                leaf.dtype,
                f"{leaf.numbers:,}",
                format_bytes(leaf.bytes),
                "unsplit" if leaf.shard == leaf.shape else _dims(leaf.shard),
            )


def _sums(sizes: Summary, work: float | None) -> Iterator[str]:
    yield f"parameters  {sizes.numbers:,} in {len(sizes.leaves)} leaves"
    for name in ("params", "extra", "optimizer"):
        held: StateBytes = getattr(sizes, name)
        if held.total:
            yield (
                f"{name:10}  {format_bytes(held.total)}, {format_bytes(held.device)} of "
                "it on a device"
            )
    yield f"state       {format_bytes(sizes.device_bytes)} on a device"
    if work is not None:
        yield f"step        {format_count(work)}FLOP in products of loss and gradient"


def _leaf(name: str, leaf: Any) -> LeafSize:
    shard = tuple(leaf.sharding.shard_shape(leaf.shape))
    each = leaf.dtype.itemsize
    return LeafSize(
        name=name,
        shape=tuple(leaf.shape),
        shard=shard,
        dtype=str(leaf.dtype),
        numbers=leaf.size,
        bytes=leaf.size * each,
        device_bytes=math.prod(shard) * each,
    )


def _bytes(tree: Any) -> StateBytes:
    leaves = [_leaf(name, leaf) for name, leaf in named_leaves(tree).items()]
    return StateBytes(sum(x.bytes for x in leaves), sum(x.device_bytes for x in leaves))


def _dims(shape: tuple[int, ...]) -> str:
    return " x ".join(map(str, shape)) or "scalar"
