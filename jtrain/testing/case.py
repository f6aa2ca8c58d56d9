"""The case under test: a loss with its parameters, batch and optimizer, and what its calls do."""

import contextlib
import dataclasses
import functools
import inspect
import os
import random
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import optax

from jtrain.core.loss import LossOutput, Stateful, normalize_loss
from jtrain.core.loss_checks import check_weights
from jtrain.core.placement import Placement, Unplaced
from jtrain.core.pytree import named_leaves
from jtrain.core.rows import with_rows
from jtrain.core.step import StepFn, make_step
from jtrain.core.types import Batch, Dims, Extra, Key, LossFn, Params, RowsInteract
from jtrain.errors import CodeError, LossError, UserError
from jtrain.inspect.debug.single_device import set_up_single_device
from jtrain.inspect.debug.source import find_raise
from jtrain.testing.splits import take_rows
from jtrain.train.experiment import RunConfig, build_experiment

NOISE_STD = 0.02  # of the noise added to the initial parameters of a config
INSPECTED_ROWS = 4096  # of a config, whose labels and tokens are inspected
# Functions whose number differs between processes, or with the number of devices.
COUNTS = ("device_count", "local_device_count", "process_count", "process_index")
HOST = [*((jax, name) for name in COUNTS), (os, "getpid")]
Loss: TypeAlias = LossFn | Stateful
# A function like `jtrain.make_step`: (loss, optimizer, *, microbatches, rows_interact, psum, ...).
MakeStep: TypeAlias = Callable[..., StepFn]


@dataclasses.dataclass(frozen=True)
class PlacedLoss:
    """A loss that depends on the placement: `build(placement)` returns it."""

    build: Callable[[Placement], Loss]


def place_loss(build: Callable[[Placement], Loss]) -> PlacedLoss:
    """Mark a function from a placement to a loss, for models that constrain their own arrays."""
    return PlacedLoss(build)


class TracedLoss(NamedTuple):
    """The jaxpr of a loss, with the origin of each input."""

    program: Any  # closed jaxpr
    inputs: Sequence[tuple[int, Any]]
    """For each input its argument (params 0, extra 1, batch 2, rng 3) and its path in it."""
    returned: LossOutput
    """The output of the loss, with shapes instead of arrays."""


@dataclasses.dataclass(eq=False)
class SideEffects:
    """Side effects of recorded losses, collected over all their calls."""

    changed: set[str] = dataclasses.field(default_factory=set)
    """Leaves of arguments that a call replaced, removed or added: `batch['x']`."""
    drew_from: set[str] = dataclasses.field(default_factory=set)
    """Generators of the host that a call drew from: `numpy.random`."""
    asked: set[str] = dataclasses.field(default_factory=set)
    """Functions of `HOST` that a call asked for a number of its process."""
    shift: int = 0
    """Added to these numbers: another process would get others."""

    def record(self, loss: LossFn | Stateful) -> LossFn | Stateful:
        """Return the loss with each call recorded."""
        if isinstance(loss, Stateful):
            return Stateful(self._record(loss.loss, ("params", "extra", "batch")))
        return self._record(loss, ("params", "batch"))

    def _record(self, fn: Callable[..., Any], names: tuple[str, ...]) -> Callable[..., Any]:
        leaves_of = lambda args: {
            f"{name}[{leaf!r}]": x
            for name, tree in zip(names, args, strict=False)
            for leaf, x in (named_leaves(tree).items() if jax.tree.leaves(tree) else ())
        }

        def call(*args: Any) -> Any:
            drawn, before = _generators(), leaves_of(args)
            try:
                with contextlib.ExitStack() as stack:
                    for module, name in HOST:
                        stack.enter_context(self._watch(module, name))
                    return fn(*args)
            finally:
                after = leaves_of(args)
                names = {**before, **after}
                self.changed |= {n for n in names if before.get(n) is not after.get(n)}
                self.drew_from |= {n for n, x in _generators().items() if x != drawn[n]}

        return call

    def _watch(self, module: Any, name: str) -> Any:
        """Return a context in which calls of a function are noted, and its result is shifted."""
        function = getattr(module, name)

        def call(*args: Any, **options: Any) -> Any:
            self.asked.add(f"{module.__name__}.{name}()")
            return function(*args, **options) + self.shift

        return mock.patch.object(module, name, call)


def _generators() -> dict[str, Any]:
    numpy: Any = np.random.get_state(legacy=False)["state"]
    return {"numpy.random": (numpy["pos"], numpy["key"].tobytes()), "random": random.getstate()}


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class LossCase:
    """A loss with everything that a training step of it needs."""

    loss: PlacedLoss
    params: Params
    extra: Extra = ()
    batch: Batch  # numpy, with row and mask
    optimizer: optax.GradientTransformation
    make: MakeStep = make_step
    rows_interact: RowsInteract = "never"
    dims: Mapping[str, Dims] = dataclasses.field(default_factory=dict)
    seed: int = 0
    mask_error: str = ""  # why masks may not hide rows; empty: they may
    ragged: bool = True  # whether a mask may hide rows
    draws: bool = True  # whether random draws are compared
    half_error: str = ""  # the error for half of the rows; empty: the loss takes them
    # More batches; only their integer indices are checked.
    more_batches: Callable[[], Iterable[Batch]] = tuple
    side_effects: SideEffects = dataclasses.field(default_factory=SideEffects)
    source: str = ""  # a description of the config or file

    @property
    def rows(self) -> int:
        """Number of rows of the batch."""
        return len(self.batch["mask"])

    @property
    def half_batch(self) -> Batch:
        """The first half of the rows."""
        return take_rows(self.batch, np.arange(self.rows // 2))

    @property
    def key(self) -> Key:
        """Key of the run; each step folds in its number."""
        return jax.random.key(self.seed)

    @property
    def step_key(self) -> Key:
        """Key of the first step."""
        return jax.random.fold_in(self.key, 0)

    def unplaced_loss(self) -> Loss:
        """Return the loss for one device, the same object each time."""
        return self.loss.build(Unplaced())

    def terms(self) -> Callable[..., LossOutput]:
        """Return `(params, extra, batch, rng) -> LossOutput`, traced with the lines of the loss.

        Each call returns a new function object, because JAX caches traces by function object.
        """
        terms = inspect.unwrap(normalize_loss(self.unplaced_loss(), ragged=not self.mask_error))
        return lambda *args: terms(*args)

    def traced(self) -> TracedLoss:
        """Trace the loss again, as in training on one device."""
        args = self.params, self.extra, dict(self.batch), self.step_key
        program, returned = jax.make_jaxpr(self.terms(), return_shape=True)(*args)
        paths = [path for path, _ in jax.tree_util.tree_leaves_with_path(args)]
        return TracedLoss(program, [(path[0].idx, path[1:]) for path in paths], returned)

    @functools.cached_property
    def trace(self) -> TracedLoss:
        """Cached trace of the loss."""
        return self.traced()


def build_case(loss: Loss | PlacedLoss, params: Params, batch: Batch, **rest: Any) -> LossCase:
    """Build a case, with the batch cut to an even number of rows.

    Raises:
        LossError: if the loss breaks its contract, or the batch has one row.
        CodeError: if the loss cannot be traced; the message has its lines.
    """
    full = {name: _canonical(array) for name, array in with_rows(batch).items()}
    rows = len(full["mask"])
    if rows < 2:
        raise LossError(
            "a check splits the rows of a batch, and this batch has 1. Give at least 2, better 8: "
            "assert_invariant(loss, params, batch of 8 rows), or batch=8 of a config."
        )
    if not full["mask"].any():
        raise LossError(
            "the mask hides all rows of the batch, so there is nothing to compare. Give a batch "
            "with unmasked rows."
        )
    even_batch = {name: array[: rows // 2 * 2] for name, array in full.items()}
    effects = SideEffects()
    placed = loss.build if isinstance(loss, PlacedLoss) else lambda place: loss
    recorded = _cache_unplaced(lambda place: effects.record(placed(place)))
    case = LossCase(
        loss=PlacedLoss(recorded), params=params, batch=even_batch, side_effects=effects, **rest
    )
    _check_trainable(case.params)
    case = dataclasses.replace(case, mask_error=_mask_refusal(case))
    return dataclasses.replace(case, half_error=_half_refusal(case))


def build_loss_case(config: RunConfig, rows: int, *, draws: bool = True) -> LossCase:
    """Return the loss of a config, `rows` rows of its first batch and its initial parameters.

    Noise is added to the parameters, so that those initialized to zero take part.

    Args:
        draws: whether the random draws of the loss are compared, too.

    Raises:
        UserError: if the config cannot be assembled on one device.
    """
    program = set_up_single_device(config)
    experiment, resolved_config = program.resolved.experiment, program.resolved.config
    state, train = program.initial_state(), experiment.train
    batch = {name: array[:rows] for name, array in train[0].items()}

    def more_batches() -> Iterator[Batch]:
        for step in range(-(-INSPECTED_ROWS // train.size)):
            yield train[step]

    description = (
        f"{config.name or 'the config'}: {len(batch['row'])} of the {train.size} rows of its "
        f"first batch; the full model, noise of {NOISE_STD} on its initial parameters; in float32"
    )
    return build_case(
        place_loss(lambda place: build_experiment(resolved_config, place).loss),
        _add_noise(jax.device_get(state.params)),
        batch,
        extra=jax.device_get(state.extra),
        optimizer=experiment.transformation,
        rows_interact=experiment.rows_interact,
        dims=experiment.dims,
        seed=config.seed,
        draws=draws,
        more_batches=more_batches,
        source=description,
    )


def _add_noise(params: Params) -> Params:
    """Return the parameters with normal noise added to each number."""
    rng = np.random.default_rng(0)
    add_noise = lambda x: (x + NOISE_STD * rng.standard_normal(np.shape(x))).astype(x.dtype)
    return jax.tree.map(add_noise, params)


def _cache_unplaced(build: Callable[[Placement], Loss]) -> Callable[[Placement], Loss]:
    """Cache the loss that `build` returns for one device, so that JAX reuses its trace."""
    cached = functools.cache(build)
    return lambda place: cached(place) if type(place) is Unplaced else build(place)


def _canonical(array: Any) -> np.ndarray:
    """Convert the array as JAX does: 64-bit integers to int32, floats to float32."""
    array = np.asarray(array)
    return array.astype(jax.dtypes.canonicalize_dtype(array.dtype))


def _check_trainable(params: Params) -> None:
    """Raise unless there are parameters and all have a floating-point type."""
    leaves = jax.tree.leaves(params)
    if not leaves:
        raise LossError("there are no parameters, so there is no gradient to compare. Give some.")
    for leaf in leaves:
        if not jnp.issubdtype(jnp.result_type(leaf), jnp.floating):
            raise LossError(
                f"a parameter holds {jnp.result_type(leaf)} values, which have no gradient. Give "
                f"it as float32 (a complex number as two), or hold it in `extra`."
            )


def _mask_refusal(case: LossCase) -> str:
    """Return why the loss takes no batch with hidden rows; empty if it does."""
    loss = case.unplaced_loss()

    def trace(ragged: bool) -> None:
        terms = normalize_loss(loss, ragged=ragged)
        output = lambda params: terms(params, case.extra, case.batch, case.step_key)
        check_weights(output, case.params)

    trace(False)
    if not case.ragged:
        return "masks may not hide rows of its batches (ragged=False)."
    try:
        trace(True)
    except LossError as error:
        return str(error).partition("\n")[0]  # the lines of the loss follow
    return ""


def _half_refusal(case: LossCase) -> str:
    """Return the error of the loss for half of the rows; empty if it takes them."""
    terms = normalize_loss(case.unplaced_loss(), ragged=not case.mask_error)
    try:
        jax.eval_shape(terms, case.params, case.extra, case.half_batch, case.step_key)
    except Exception as error:
        if not is_raised_by_loss(error):
            raise
        return describe_error(error)
    return ""


def is_raised_by_loss(error: Exception) -> bool:
    """Return whether an error comes from code of the loss and not from jtrain's own checks."""
    if isinstance(error, UserError):
        return isinstance(error, CodeError)
    return find_raise(error) is not None


def describe_error(error: Exception) -> str:
    """Return the type of an error, its line in the loss and the first line of its message."""
    if isinstance(error, CodeError) and isinstance(error.__context__, Exception):
        error = error.__context__
    at, line = find_raise(error), (str(error) or repr(error)).strip().partition("\n")[0]
    where = f" at {at}" if at else ""
    return f"{type(error).__name__}{where}: {line if line.endswith('.') else f'{line}.'}"
