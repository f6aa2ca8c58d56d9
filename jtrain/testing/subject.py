"""What is checked: a loss, where it starts, a batch, and who takes the steps."""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
import optax

from jtrain.errors import LossError
from jtrain.loss_checks import refuse_weights_of_params
from jtrain.rows import with_rows
from jtrain.step import StepFn, make_step
from jtrain.terms import in_terms
from jtrain.types import (
    Anywhere,
    Batch,
    Couples,
    Dims,
    Extra,
    Key,
    LossFn,
    Params,
    Placement,
    Stateful,
)

Loss: TypeAlias = LossFn | Stateful
# What `jtrain.make_step` is: (loss, optimizer, *, microbatches, couples, psum, ragged, lay, ...).
MakeStep: TypeAlias = Callable[..., StepFn]


@dataclasses.dataclass(frozen=True)
class Placed:
    """A loss that is another under each placement: `build(place)` gives it."""

    build: Callable[[Placement], Loss]


def placed(build: Callable[[Placement], Loss]) -> Placed:
    """Marks a function from a placement to a loss, where the model says what its arrays are."""
    return Placed(build)


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Subject:
    """A loss and all that a step of it takes."""

    loss: Placed
    params: Params
    extra: Extra = ()
    batch: Batch  # numpy, with row and mask
    optimizer: optax.GradientTransformation
    make: MakeStep = make_step
    couples: Couples = "nothing"
    dims: Mapping[str, Dims] = dataclasses.field(default_factory=dict)
    seed: int = 0
    masks: str = ""  # why no row of its batches may be hidden; empty: any may be
    said: str = ""  # where it is from

    @property
    def rows(self) -> int:
        """How many the batch has."""
        return len(self.batch["mask"])

    @property
    def key(self) -> Key:
        """Of the run: a step folds its number in."""
        return jax.random.key(self.seed)

    @property
    def step_key(self) -> Key:
        """What the first step draws from."""
        return jax.random.fold_in(self.key, 0)

    def alone(self) -> Loss:
        """The loss on one device."""
        return self.loss.build(Anywhere())


def subject(loss: Loss | Placed, params: Params, batch: Batch, **rest: Any) -> Subject:
    """What is checked, its batch cut to an even number of rows.

    Raises:
        LossError: if the loss keeps no contract, or the batch has one row.
    """
    whole: dict[str, Any] = dict(jax.tree.map(np.asarray, dict(with_rows(batch))))
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
    build = loss if isinstance(loss, Placed) else Placed(lambda place: loss)
    made = Subject(loss=build, params=params, batch=even, **rest)
    refuse_nothing_to_learn(made.params)
    return dataclasses.replace(made, masks=_refused(made))


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


def _refused(made: Subject) -> str:
    """Why the loss takes no batch with hidden rows; empty if it does."""
    loss = made.alone()

    def trace(ragged: bool) -> None:
        terms = in_terms(loss, ragged=ragged)
        of = lambda params: terms(params, made.extra, made.batch, made.step_key)
        refuse_weights_of_params(of, made.params)

    trace(False)
    try:
        trace(True)
    except LossError as error:
        return str(error)
    return ""
