"""Summary of a run: its leaves, their bytes on a device, the FLOPs of a step."""

import dataclasses
import math
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
from jtrain.train.program import Program


class LeafSize(NamedTuple):
    """Size of a leaf."""

    name: str
    shape: tuple[int, ...]
    shard: tuple[int, ...]
    """Shape of the shard on one device."""
    dtype: str
    numbers: int
    bytes: int
    device_bytes: int


class StateBytes(NamedTuple):
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


def summarize(abstract_state: TrainState) -> Summary:
    """Return the sizes of a state, given as shapes, dtypes and shardings."""
    parts = [
        _leaves(tree)
        for tree in (abstract_state.params, abstract_state.extra, abstract_state.opt_state)
    ]
    total = lambda part: sum(leaf.bytes for leaf in part)
    device = lambda part: sum(leaf.device_bytes for leaf in part)
    return Summary(parts[0], *(StateBytes(total(part), device(part)) for part in parts))


def _leaves(tree: Any) -> tuple[LeafSize, ...]:
    leaves = []
    for name, leaf in named_leaves(tree).items():
        shard, size = tuple(leaf.sharding.shard_shape(leaf.shape)), leaf.dtype.itemsize
        sizes = leaf.size, leaf.size * size, math.prod(shard) * size
        leaves.append(LeafSize(name, tuple(leaf.shape), shard, str(leaf.dtype), *sizes))
    return tuple(leaves)


class StepFlops(NamedTuple):
    """FLOPs in the products of loss and gradient over the whole batch; None where unknown."""

    model: float | None
    """Without what is computed twice."""
    hardware: float | None
    """With what the backward pass computes again."""


def count_step_flops(program: Program, *, lower_bound: bool = False) -> StepFlops:
    """Return the FLOPs of loss and gradient over the whole batch.

    They are counted by tracing, without compiling or using a device. Products in the optimizer
    (Muon's) are not included.

    Args:
        lower_bound: what is unknown counts as little as it can.

    Raises:
        LossError: if the loss breaks its contract.
        DataError: if the first batch cannot be read.
    """
    x, abstract_state = (
        program.resolved.experiment,
        device_shardings(program.resolved.abstract_state),
    )
    terms = normalize_loss(program.loss, ragged=x.train.ragged)

    def loss(params, extra, batch, key):
        output = terms(params, extra, batch, key)
        return combine(output.terms, [mean.weight for mean in output.terms.means])

    args = (
        abstract_state.params,
        abstract_state.extra,
        x.train[0],
        jax.eval_shape(TrainState.step_key, abstract_state),
    )
    model = count_model_flops(loss, *args, lower_bound=lower_bound)
    return StepFlops(model, count_flops(jax.grad(loss), *args, lower_bound=lower_bound))


class FlopsBound(NamedTuple):
    """FLOPs of a step, or a lower bound of them."""

    flops: StepFlops
    exact: bool
    """False: a loop of unknown length counted as one turn, an unknown kernel as nothing."""


def bound_step_flops(program: Program) -> FlopsBound:
    """Return the FLOPs of `count_step_flops`, and a lower bound where they are not known."""
    known = count_step_flops(program)
    exact = None not in known
    return FlopsBound(known if exact else count_step_flops(program, lower_bound=True), exact)


def measure_work(program: Program) -> StepWork | None:
    """Return the work of a step and the peak of its devices; None for devices of unknown peak."""
    peak = peak_flops(program.resolved.devices)
    return None if peak is None else StepWork(*count_step_flops(program), peak)


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
    return {
        "parameters": sizes.numbers,
        "bytes": {name: part._asdict() for name, part in _parts(sizes).items()},
        "device_bytes": sizes.device_bytes,
        **{name: x for name, x in flops.items() if x is not None},
        "leaves": [leaf._asdict() for leaf in sizes.leaves],
    }


def format_table(sizes: Summary, work: StepFlops) -> str:
    """Return a line for each module and leaf, then the sums, in columns."""
    rows = [("leaf", "shape", "dtype", "numbers", "bytes", "on a device")]
    modules: dict[str, list[LeafSize]] = {}
    for leaf in sizes.leaves:
        modules.setdefault(leaf.name.rpartition("/")[0], []).append(leaf)
    dims = lambda shape: " x ".join(map(str, shape)) or "scalar"
    for module, leaves in modules.items():
        if module:
            numbers, held = sum(x.numbers for x in leaves), sum(x.bytes for x in leaves)
            rows.append((module, "", "", f"{numbers:,}", format_bytes(held), ""))
        for leaf in leaves:
            name = f"{'  ' if module else ''}{leaf.name.rpartition('/')[2]}"
            shard = "unsplit" if leaf.shard == leaf.shape else dims(leaf.shard)
            size = f"{leaf.numbers:,}", format_bytes(leaf.bytes)
            rows.append((name, dims(leaf.shape), leaf.dtype, *size, shard))
    sums = [f"parameters  {sizes.numbers:,} in {len(sizes.leaves)} leaves"]
    for name, part in _parts(sizes).items():
        if part.total:
            total, device = map(format_bytes, part)
            sums.append(f"{name:10}  {total}, {device} of it on a device")
    sums.append(f"state       {format_bytes(sizes.device_bytes)} on a device")
    if work.model is not None:
        sums.append(f"step        {format_count(work.model)}FLOP in products of loss and gradient")
    if work.hardware is not None and work.hardware != work.model:
        words = "with what the backward pass computes again"
        sums.append(f"{'' if work.model else 'step':10}  {format_count(work.hardware)}FLOP {words}")
    return "\n".join([*align_columns(rows, right=(3, 4)), "", *sums])


def _parts(sizes: Summary) -> dict[str, StateBytes]:
    return {"params": sizes.params, "extra": sizes.extra, "optimizer": sizes.optimizer}
