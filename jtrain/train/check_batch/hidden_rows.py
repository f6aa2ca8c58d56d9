"""Check that the rows of a batch that its mask hides, the padding, change no sum of a loss."""

import functools
from collections.abc import Callable, Sequence

import jax
import numpy as np

from jtrain.core.loss import LossOutput, named_means
from jtrain.core.mean import Mean
from jtrain.core.types import Batch
from jtrain.errors import LossError

# A loss that hides its rows gives the same bits. One that couples rows may subtract a maximum over
# all of them first, which rounds in another way.
ROUNDING = 1e-4


def check_hidden_rows(
    sums: Callable[[Batch], LossOutput], batch: Batch, size: int, what: str
) -> None:
    """Raise if what hidden rows contain, or their number, changes a sum of the loss.

    The later half of the rows is hidden, once with its own contents and once with those of the
    first row: no batch with padding has to come first, and rows contain nothing that the data does
    not. Every process calls this at the same time, with rows of its own.

    Args:
        sums: returns the output of a host batch; its metric `rows` is the number of visible rows,
            with a weight of 1 in each separate copy of the loss.
        batch: on the host; the rows of this process, of `size` of all processes.

    Raises:
        LossError: naming the sum, with the line to write.
    """
    rows, mask = np.arange(len(batch["mask"])), np.asarray(batch["mask"])
    visible = mask & (rows < (len(rows) + 1) // 2)
    first = {name: array[np.where(visible, rows, 0)] for name, array in batch.items()}
    first["row"] = batch["row"]
    find = lambda rows, mask: named_means(jax.device_get(sums({**rows, "mask": mask})))
    own, other, shown = find(batch, visible), find(first, visible), find(first, mask)
    counted = shown.pop("the metric 'rows'")
    hides_more = counted.total != other.pop("the metric 'rows'").total
    del own["the metric 'rows'"]
    changed = {name for name in other if _differs(other[name], shown[name])}
    ignores_mask = not any(name.startswith("term") for name in changed)
    # Visible weights may add up to the number of rows; those of no rows add up to 0.
    none = functools.cache(lambda: find(first, np.zeros_like(mask)))
    for name, mean in own.items():
        each = mean, other[name], shown[name]
        if _differs(mean, other[name], visible):
            raise _error(name, what, each, "with other contents in them", batch, size)
        counts = name in changed or (ignores_mask and name.startswith("term"))
        is_one = np.array_equal(mean.weight, counted.weight)  # a mean over one thing in each copy
        suspect = hides_more and counts and not is_one and _counts_all(each, size)
        if suspect and _counts_all((*each, none()[name]), size):
            raise _error(name, what, each[1:], "with fewer of them", batch, size)


def _counts_all(means: Sequence[Mean], size: int) -> bool:
    """Return whether a weight is the number of all rows, or a multiple, whatever the mask is."""
    first, *others = (np.asarray(mean.weight) for mean in means)
    same = all(np.array_equal(first, other) for other in others)
    return same and bool(((first != 0) & (first % size == 0)).all())


def _differs(one: Mean, other: Mean, visible: np.ndarray | None = None) -> bool:
    """Return whether two means have other finite totals or weights, of `visible` rows if by row."""
    found = (one.total, other.total, one.weight, other.weight)
    a, b, v, w = np.broadcast_arrays(*(np.asarray(x, np.float64) for x in found))
    counted = np.isfinite([a, b, v, w]).all(0) & ((v != 0) | (w != 0))
    if visible is not None and counted.shape[:1] == visible.shape:
        counted &= visible.reshape(-1, *[1] * (counted.ndim - 1))
    far = lambda x, y: np.abs(x - y) > ROUNDING * np.maximum(np.abs(x), np.abs(y))
    with np.errstate(invalid="ignore"):
        return bool((counted & (far(a, b) | far(v, w))).any())


def _error(
    name: str, what: str, means: Sequence[Mean], how: str, batch: Batch, size: int
) -> LossError:
    before, after = (f"{np.sum(x.total):.7g} / {np.sum(x.weight):.7g}" for x in means[:2])
    return LossError(
        f"{name} counts rows that the mask hides, the padding of a last batch say: in {what} it is "
        f"{before}, and {after} {how}, so that it would depend on the batch size. "
        f"{_advise(means, batch, size)} checks.first_batch=false (check_batch=False in a call) "
        f"turns this check off."
    )


def _advise(means: Sequence[Mean], batch: Batch, size: int) -> str:
    if _counts_all(means, size):
        return 'Count visible rows alone: `jt.Mean.of(values, batch["mask"])`.'
    if np.array_equal(means[0].weight, means[1].weight):
        return (
            "The weight is right, and values depend on hidden rows: take a mean, a sum or a "
            'maximum over rows by `jnp.mean(x, where=batch["mask"])`.'
        )
    masks = [name for name, x in batch.items() if x.dtype == bool and name != "mask"]
    name = f'batch["{masks[0]}"]' if masks else "MASK"
    hidden = 'batch["mask"][:, None]' if masks and batch[masks[0]].ndim > 1 else 'batch["mask"]'
    return f"Hide them in a mask of your own, too: `jt.Mean.of(values, {name} & {hidden})`."
