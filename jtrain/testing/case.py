"""What is checked: a loss, where it starts, a batch, and who takes the steps."""

import dataclasses
import functools
import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
import optax

from jtrain.core.loss import LossOutput, Stateful, normalize_loss
from jtrain.core.loss_checks import check_weights
from jtrain.core.placement import Placement, Unplaced
from jtrain.core.rows import with_rows
from jtrain.core.step import StepFn, make_step
from jtrain.core.types import Batch, Couples, Dims, Extra, Key, LossFn, Params
from jtrain.errors import LossError
from jtrain.testing.fixed_rows import fails_on_half
from jtrain.testing.splits import taken
from jtrain.testing.watch import SideEffects

Loss: TypeAlias = LossFn | Stateful
# What `jtrain.make_step` is: (loss, optimizer, *, microbatches, couples, psum, ragged, lay, ...).
MakeStep: TypeAlias = Callable[..., StepFn]


@dataclasses.dataclass(frozen=True)
class PlacedLoss:
    """A loss that is another under each placement: `build(place)` gives it."""

    build: Callable[[Placement], Loss]


def placed(build: Callable[[Placement], Loss]) -> PlacedLoss:
    """Marks a function from a placement to a loss, where the model says what its arrays are."""
    return PlacedLoss(build)


class TracedLoss(NamedTuple):
    """A loss as a program."""

    program: Any  # of `jax.make_jaxpr`
    inputs: Sequence[tuple[int, Any]]
    """Of each input the argument that it is of (params, extra, batch, rng), and its path in it."""
    returned: LossOutput
    """Shapes in the place of arrays."""

    def leaves_of_batch(self) -> list[str | None]:
        """Return the name of each input that is a leaf of the batch; None for others."""
        return [path[0].key if argument == 2 else None for argument, path in self.inputs]


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class LossCase:
    """A loss and all that a step of it takes."""

    loss: PlacedLoss
    params: Params
    extra: Extra = ()
    batch: Batch  # numpy, with row and mask
    optimizer: optax.GradientTransformation
    make: MakeStep = make_step
    couples: Couples = "nothing"
    dims: Mapping[str, Dims] = dataclasses.field(default_factory=dict)
    seed: int = 0
    masks: str = ""  # why no row of its batches may be hidden; empty: any may be
    compute: Any = (
        None  # the narrow type that it is to be computed in; None: that of its parameters
    )
    ragged: bool = True  # whether a mask may hide rows of its batches
    draws: bool = True  # whether what it draws is compared, too
    halves: str = ""  # what it raises for half of the rows; empty: it takes them
    # Further batches, of which only the whole numbers that index something are looked at.
    further: Callable[[], Iterable[Batch]] = tuple
    watch: SideEffects = dataclasses.field(default_factory=SideEffects)
    said: str = ""  # where it is from

    @property
    def rows(self) -> int:
        """How many the batch has."""
        return len(self.batch["mask"])

    @property
    def few(self) -> Batch:
        """Half of its rows, or all where the loss takes no fewer."""
        return self.batch if self.halves else taken(self.batch, np.arange(self.rows // 2))

    @property
    def key(self) -> Key:
        """Of the run: a step folds its number in."""
        return jax.random.key(self.seed)

    @property
    def step_key(self) -> Key:
        """What the first step draws from."""
        return jax.random.fold_in(self.key, 0)

    def alone(self) -> Loss:
        """Return the loss on one device, the same each time."""
        return self.loss.build(Unplaced())

    def terms(self) -> Callable[..., LossOutput]:
        """Return `(params, extra, batch, rng) -> LossOutput`, its trace with the lines of the loss.

        It is another function object each time: of one and the same JAX keeps the first trace.
        """
        terms = inspect.unwrap(normalize_loss(self.alone(), ragged=not self.masks))
        return lambda *given: terms(*given)

    def traced(self) -> TracedLoss:
        """Trace the loss anew, as it trains on one device."""
        given = self.params, self.extra, dict(self.batch), self.step_key
        program, returned = jax.make_jaxpr(self.terms(), return_shape=True)(*given)
        paths = [path for path, _ in jax.tree_util.tree_leaves_with_path(given)]
        return TracedLoss(program, [(path[0].idx, path[1:]) for path in paths], returned)

    @functools.cached_property
    def trace(self) -> TracedLoss:
        """The trace of the loss, made once."""
        return self.traced()

    @functools.cached_property
    def trace_of_half(self) -> TracedLoss:
        """The same for half of the rows."""
        return dataclasses.replace(self, batch=self.few).traced()


def subject(loss: Loss | PlacedLoss, params: Params, batch: Batch, **rest: Any) -> LossCase:
    """What is checked, its batch cut to an even number of rows.

    Raises:
        LossError: if the loss keeps no contract, or the batch has one row.
        CodeError: if the loss cannot be traced, with its lines.
    """
    whole = {name: _canonical(array) for name, array in with_rows(batch).items()}
    rows = len(whole["mask"])
    if rows < 2:
        raise LossError(
            "a check splits the rows of a batch, and this batch has 1. Give at least 2, better 8: "
            "assert_invariant(loss, params, batch of 8 rows), or batch=8 of a config."
        )
    if not whole["mask"].any():
        raise LossError(
            "the mask hides all rows of the batch, so that there is nothing to compare. Give a "
            "batch with rows that count."
        )
    even = {name: array[: rows // 2 * 2] for name, array in whole.items()}
    watch = SideEffects()
    build = loss.build if isinstance(loss, PlacedLoss) else lambda place: loss
    watched = _kept_alone(lambda place: watch.over(build(place)))
    made = LossCase(loss=PlacedLoss(watched), params=params, batch=even, watch=watch, **rest)
    refuse_nothing_to_learn(made.params)
    masks = _refused(made)
    terms, given = normalize_loss(made.alone(), ragged=not masks), (made.extra, even, made.step_key)
    halves = fails_on_half(terms, made.params, *given)
    return dataclasses.replace(made, masks=masks, halves=halves)


def _kept_alone(build: Callable[[Placement], Loss]) -> Callable[[Placement], Loss]:
    """`build`, which builds once for one device, so that what was traced once stays known."""
    alone = functools.cache(build)
    return lambda place: alone(place) if type(place) is Unplaced else build(place)


def _canonical(array: Any) -> np.ndarray:
    """The array as JAX takes it: whole numbers of 64 bits as int32, floats as float32."""
    array = np.asarray(array)
    return array.astype(jax.dtypes.canonicalize_dtype(array.dtype))


def refuse_nothing_to_learn(params: Params) -> None:
    """Checks that there are parameters, all with a gradient.

    Raises:
        LossError: naming one that has none.
    """
    leaves = jax.tree.leaves(params)
    if not leaves:
        raise LossError("there are no parameters, so there is no gradient to compare. Give some.")
    for leaf in leaves:
        if not jnp.issubdtype(jnp.result_type(leaf), jnp.floating):
            raise LossError(
                f"a parameter holds {jnp.result_type(leaf)} values, which have no gradient. Give "
                f"it as float32, or hold it in `extra`."
            )


def _refused(made: LossCase) -> str:
    """Why the loss takes no batch with hidden rows; empty if it does."""
    loss = made.alone()

    def trace(ragged: bool) -> None:
        terms = normalize_loss(loss, ragged=ragged)
        of = lambda params: terms(params, made.extra, made.batch, made.step_key)
        check_weights(of, made.params)

    trace(False)
    if not made.ragged:
        return "no mask is to hide a row of its batches (ragged=False)."
    try:
        trace(True)
    except LossError as error:
        return str(error).partition("\n")[0]  # the lines of the loss follow
    return ""
