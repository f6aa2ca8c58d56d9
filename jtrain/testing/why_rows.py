"""What is wrong in a loss that does not add up over rows, from what does not and by how much."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from jtrain.terms import Returned
from jtrain.testing.compare import apart, numbers
from jtrain.testing.meeting import where_rows_meet
from jtrain.testing.result import distances
from jtrain.testing.splits import Split, ragged, scrambled, taken
from jtrain.testing.subject import Subject
from jtrain.testing.sums import OfRows, Sums, together
from jtrain.types import Batch, Mean


class Cause(NamedTuple):
    """A name, a sentence, and whether it is a fault or only to be known."""

    name: str
    why: str
    fault: bool = True


class Scene(NamedTuple):
    """The sums of the parts and of the whole."""

    split: Split
    rows: OfRows
    parts: Sequence[Sums]
    whole: Sums
    tolerance: float


def cause_of_split(split: Split, rows: OfRows, tolerance: float) -> Cause:
    """Why the parts of `split` do not add up to its whole."""
    of, quiet = rows.subject, OfRows(rows.subject, double=rows.double, draws=False)
    got, want = (together(quiet, parts)[0] for parts in (split.parts, [split.whole]))
    if distances(got, want).largest <= tolerance:
        return _of_draws(rows, tolerance)
    (_, parts), (_, whole) = together(quiet, split.parts), together(quiet, [split.whole])
    scene = Scene(split, quiet, parts, whole[0], tolerance)
    for name, mean in _means(whole[0].returned):
        of_parts = [dict(_means(part.returned))[name] for part in parts]
        if found := _of_mean(name, scene, of_parts, mean, of):
            return found
    for index, coefficient in enumerate(whole[0].returned.terms.coefficients):
        mine = [part.returned.terms.coefficients[index] for part in parts]
        if any(abs(float(c) - float(coefficient)) > tolerance for c in mine):
            told = ", ".join(f"{float(c):.6g}" for c in mine)
            return Cause(
                "coefficient of rows",
                f"the coefficient of term {index} of the loss is {float(coefficient):.6g} for all "
                f"rows and {told} for parts of them: it is computed from the rows. Take it out of "
                f"the batch, or make it a Mean of its own.",
            )
    return Cause(
        "gradient",
        "totals and weights add up and the gradient does not: a derivative of its own "
        "(custom_vjp, custom_jvp) or a stop_gradient that sees more than its row.",
    )


def _means(returned: Returned) -> list[tuple[str, Mean]]:
    """All that adds up, by what it is called."""
    terms = [(f"term {i} of the loss", mean) for i, mean in enumerate(returned.terms.means)]
    metrics = [(f"the metric {name!r}", mean) for name, mean in returned.metrics.items()]
    extra = [
        (f"the leaf {name!r} of extra", mean) for name, mean in _changes(returned.extra).items()
    ]
    return [*terms, *metrics, *extra]


def _first(numbers: Any) -> str:
    return f"{float(np.ravel(numbers)[0]):.6g}"


def _changes(extra: object) -> dict[str, Mean]:
    leaves = numbers(extra)
    names = {name.rpartition("/")[0] for name in leaves}
    return {n: Mean(leaves[f"{n}/total"], leaves[f"{n}/weight"]) for n in sorted(names)}


def _of_mean(
    name: str, scene: Scene, parts: Sequence[Mean], whole: Mean, of: Subject
) -> Cause | None:
    """Why a mean does not add up; None if it does."""
    total = sum(np.asarray(part.total, np.float64) for part in parts)
    weight = sum(np.asarray(part.weight, np.float64) for part in parts)
    right_weight = apart(weight, whole.weight).by <= scene.tolerance
    right_total = apart(total, whole.total).by <= scene.tolerance
    same_value = apart(total * whole.weight, np.asarray(whole.total, np.float64) * weight).by
    if (right_weight and right_total) or same_value <= scene.tolerance:
        return None
    if scene.split.kind == "mask":
        return _of_hidden(name, scene, parts[0], whole, right_weight=right_weight, of=of)
    if scene.split.kind == "order":
        return _ranked(name, of) or Cause(
            "position",
            f"{name} is another where the same rows stand in another order: it depends on the "
            f"place of a row in what the loss sees. Use what the row holds, `batch['row']` say.",
        )
    if not right_weight:
        each = ", ".join(_first(part.weight) for part in parts)
        return Cause(
            "mean of means",
            f"{name} has the weights {each} of two halves and {_first(whole.weight)} of both: they "
            f"do not add up, so it is a mean of the halves' own means, in which rows of the "
            f"smaller one count more. Return `jt.Mean.of(values_by_row, batch['mask'])`: a sum "
            f"over rows and its weight.",
        )
    where = where_rows_meet(of)
    told = f" ({where.told})" if where else ""
    return _ranked(name, of) or Cause(
        "batch statistic",
        f"the weight of {name} adds up and its total does not: what a row adds depends on the rows "
        f"beside it{told}, as in batch norm or a contrastive loss. Take the statistic within a row "
        f'(layer norm, group norm), or say couples="batch" and never split the batch.',
    )


def _ranked(name: str, of: Subject) -> Cause | None:
    """Rows compete with one another, if the trace of the loss shows it."""
    where = where_rows_meet(of)
    if where is None or not where.ranks:
        return None
    return Cause(
        "rows are ranked",
        f"{name} does not add up, for rows compete with those that are beside them for places "
        f"({where.told}): who is chosen depends on the split. Choose within a row, or say "
        f'couples="batch" and never split the batch.',
    )


def _of_hidden(
    name: str, scene: Scene, got: Mean, want: Mean, *, right_weight: bool, of: Subject
) -> Cause:
    """Why hidden rows change a mean."""
    padded, rows = scene.split.parts[0], scene.rows
    real, all_rows = int(padded["mask"].sum()), len(padded["mask"])
    if not right_weight:
        found, exact = _first(got.weight), _first(want.weight)
        same = apart(got.total, want.total).by <= scene.tolerance
        more = "divided by the padded size" if same else "counted with hidden rows"
        return Cause(
            "padded size" if same else "hidden rows",
            f"{name} is {more}: its weight is {found} where the mask hides all but {real} of "
            f"{all_rows} rows, and {exact} of these alone. Count by the mask: "
            f"`jt.Mean.of(values_by_row, batch['mask'])`.",
        )
    other = dict(_means(rows(scrambled(padded), rows.weights(padded)).returned))[name]
    if apart(other.total, got.total).by <= scene.tolerance:
        return Cause(
            "padded size",
            f"{name} changes with the number of hidden rows and not with what they hold: something "
            f"is divided by the size of the array. Divide by what the mask counts.",
        )
    if _meet(rows, padded, scene.tolerance):
        return Cause(
            "hidden rows in a statistic",
            f"what the hidden rows hold changes {name}, through a statistic over rows that counts "
            f"them, too. Give the mask to the layer that takes it.",
        )
    return Cause(
        "hidden rows",
        f"what the hidden rows hold is counted in the total of {name}: the mask reaches its weight "
        f"and not its values. `jt.Mean.of(values_by_row, batch['mask'])` takes care of both.",
    )


def _meet(rows: OfRows, batch: Batch, tolerance: float) -> bool:
    """Whether the real rows of a batch, whole, give another total than one half and the other."""
    real = taken(batch, np.flatnonzero(batch["mask"]))
    half = len(real["mask"]) // 2
    if not half:
        return False
    pieces = [taken(real, np.arange(half)), taken(real, np.arange(half, len(real["mask"])))]
    got, want = together(rows, pieces)[0], together(rows, [real])[0]
    return distances(got, want).largest > tolerance


def _of_draws(rows: OfRows, tolerance: float) -> Cause:
    """Whose key is drawn from, seen from what changes with the numbers of rows."""
    base, none = rows.subject.batch, rows.subject.masks
    seen = ragged(base) if not none else base
    first = together(rows, [seen])[0]

    def changes(which: Callable[[np.ndarray], np.ndarray]) -> bool:
        other = {**seen, "row": which(seen["row"]).astype(np.int32)}
        return distances(together(rows, [other])[0], first).largest > tolerance

    beside = np.arange(len(seen["row"])) > 0
    if not changes(lambda row: row + 1000):
        return Cause(
            "key of the position",
            "what is drawn stays the same when rows get other numbers: its key does not come from "
            "`row` but from the place in what the loss sees, which a split changes. Draw for each "
            "row by its key of `jt.row_keys(rng, batch)`.",
        )
    if not changes(lambda row: np.where(beside, row + 1000, row)):
        return Cause(
            "one draw for the batch",
            "a layer draws once for all rows that it sees, by the key of the first of them: what a "
            "row gets depends on the layout. Known of layers of other libraries; jtrain's own draw "
            "by `jt.row_keys(rng, batch)`. Steps are compared without draws.",
            fault=False,
        )
    return Cause(
        "key of other rows",
        "what a row draws depends on the rows beside it. Draw by `jt.row_keys(rng, batch)` and use "
        "each key for its row alone.",
    )
