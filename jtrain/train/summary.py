"""Summary of a run: its leaves, their bytes on a device, the FLOPs of a step."""

import dataclasses
import math
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax

from jtrain.core.loss import combine, normalize_loss
from jtrain.core.pytree import named_leaves
from jtrain.core.state import TrainState
from jtrain.io.formatting import align_columns, format_bytes, format_count
from jtrain.parallel.chips import peak_flops
from jtrain.parallel.offload import device_shardings
from jtrain.train.flops import count_flops, count_model_flops
from jtrain.train.hooks.speed import StepWork
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


class StepFlops(NamedTuple):
    """FLOPs in the products of loss and gradient over the whole batch; None where unknown."""

    model: float | None
    """Without what is computed twice."""
    hardware: float | None
    """With what the backward pass computes again."""


def count_step_flops(setup: TrainSetup) -> StepFlops:
    """Return the FLOPs of loss and gradient over the whole batch.

    `train.model_flops` and `train.flops` count them by tracing, without compiling or using a
    device. Products in the optimizer (Muon's) are not included.

    Raises:
        LossError: if the loss breaks its contract.
        DataError: if the first batch cannot be read.
    """
    loss, args = _loss(setup)
    return StepFlops(count_model_flops(loss, *args), count_flops(jax.grad(loss), *args))


class FlopsBound(NamedTuple):
    """FLOPs of a step, or a lower bound of them."""

    flops: StepFlops
    exact: bool
    """False: a loop of unknown length counted as one turn, an unknown kernel as nothing."""


def bound_step_flops(setup: TrainSetup) -> FlopsBound:
    """Return the FLOPs of `count_step_flops`, and a lower bound where they are not known."""
    known = count_step_flops(setup)
    if None not in known:
        return FlopsBound(known, True)
    loss, args = _loss(setup)
    least = StepFlops(
        count_model_flops(loss, *args, lower_bound=True),
        count_flops(jax.grad(loss), *args, lower_bound=True),
    )
    return FlopsBound(least, False)


def _loss(setup: TrainSetup) -> tuple[Callable[..., Any], tuple]:
    """Return the loss of a whole batch as a scalar function, and its arguments."""
    x, like = setup.experiment, device_shardings(setup.like)
    terms = normalize_loss(setup.loss, ragged=x.train.ragged)

    def loss(params, extra, batch, key):
        output = terms(params, extra, batch, key)
        return combine(output.terms, [mean.weight for mean in output.terms.means])

    key = jax.eval_shape(TrainState.step_key, like)
    return loss, (like.params, like.extra, x.train[0], key)


def measure_work(setup: TrainSetup) -> StepWork | None:
    """Return the work of a step and the peak of its devices; None for devices of unknown peak."""
    peak = peak_flops(setup.devices)
    return None if peak is None else StepWork(*count_step_flops(setup), peak)


def format_table(sizes: Summary, work: StepFlops | None = None) -> str:
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


def to_json_values(sizes: Summary, work: StepFlops) -> dict[str, Any]:
    """Return the summary as plain numbers, in bytes and FLOPs; each of these only if known."""
    flops = {"flops": work.hardware, "model_flops": work.model}
    known = {name: x for name, x in flops.items() if x is not None}
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


def _sums(sizes: Summary, work: StepFlops | None) -> Iterator[str]:
    yield f"parameters  {sizes.numbers:,} in {len(sizes.leaves)} leaves"
    for name in ("params", "extra", "optimizer"):
        held: StateBytes = getattr(sizes, name)
        if held.total:
            yield (
                f"{name:10}  {format_bytes(held.total)}, {format_bytes(held.device)} of "
                "it on a device"
            )
    yield f"state       {format_bytes(sizes.device_bytes)} on a device"
    model, hardware = work or StepFlops(None, None)
    if model is not None:
        yield f"step        {format_count(model)}FLOP in products of loss and gradient"
    if hardware is not None and hardware != model:
        words = "with what the backward pass computes again"
        yield f"{'' if model else 'step':10}  {format_count(hardware)}FLOP {words}"


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
