"""Layout of `parallel.kind: auto`, chosen by the memory that a step needs."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jtrain.core.interpret import REMAT, as_function, computed_outputs, equations_in, inner_programs
from jtrain.core.loss import combine, normalize_loss
from jtrain.core.precision.cast import cast_params
from jtrain.core.state import TrainState
from jtrain.parallel import FSDP, Auto, Axes, Device, Layout, MemoryNeeds
from jtrain.parallel.devices import devices
from jtrain.parallel.strategies.auto import choose_slices
from jtrain.train.experiment import Experiment, RunConfig, build_experiment, shapes
from jtrain.train.initial_state import trace_state
from jtrain.train.schedule_steps import resolve_durations


class RematRegion(NamedTuple):
    """Region of a function under `jax.checkpoint`: recomputed in the backward pass."""

    saved_bytes: int
    """Bytes of residuals while the region is recomputed."""
    given: tuple[Any, ...]
    """Shapes and dtypes of the inputs of the region."""


def saved_residuals(fn: Callable[..., Any], first: Any, *rest: Any) -> int:
    """Return the bytes of residuals of a scalar `fn`, differentiated by its first argument.

    Residuals that are arguments themselves do not count.
    """
    return _own(lambda x, *others: jax.vjp(lambda x: fn(x, *others), x)[1], first, *rest)


def largest_remat_region(fn: Callable[..., Any], *args: Any) -> RematRegion:
    """Return the region of `fn(*args)` under `jax.checkpoint` with the most residuals.

    A region in a loop counts once. Without a region it is one of no bytes.
    """
    found = equations_in(jax.make_jaxpr(fn)(*args))
    regions = [_region(equation) for equation in found if equation.primitive.name in REMAT]
    return max(regions, key=lambda region: region.saved_bytes, default=RematRegion(0, ()))


def num_bytes(of: Any) -> int:
    """Return the bytes of an array, by its shape and dtype."""
    return of.size * of.dtype.itemsize


def _region(eqn: Any) -> RematRegion:
    run = as_function(inner_programs(eqn)[0])
    given = tuple(jax.ShapeDtypeStruct(v.aval.shape, v.aval.dtype) for v in eqn.invars)
    real = [i for i, of in enumerate(given) if jnp.issubdtype(of.dtype, jnp.inexact)]

    def backward(*inputs: Any) -> Any:
        def of_inexact(*changed: Any) -> Any:
            now = dict(zip(real, changed, strict=True))
            return run(*(now.get(i, x) for i, x in enumerate(inputs)))

        return jax.vjp(of_inexact, *(inputs[i] for i in real))[1]

    return RematRegion(_own(backward, *given), given)


def _own(fn: Callable[..., Any], *args: Any) -> int:
    """Return the bytes of the results of `fn(*args)` that are none of its arguments."""
    return sum(map(num_bytes, computed_outputs(jax.make_jaxpr(fn)(*args))))


def choose_layout(config: RunConfig, among: Sequence[Device] | None) -> tuple[Layout, str]:
    """Return the layout of a config; for `auto`, and `fsdp` on slices, one that fits, and why.

    For `auto` the loss is traced once to count its residuals, and once under each layout that
    splits more than rows and state, to check that the model has dims for it.

    Raises:
        UserError: as `set_up`; or if the rows of a batch divide into no layout.
    """
    if isinstance(config.parallel, FSDP):
        present = devices(config.parallel.devices, among)
        needs_of = lambda: trace_memory_needs(config, Axes(), present[:1])
        return choose_slices(config.parallel, present, needs_of)
    if not isinstance(config.parallel, Auto):
        return config.parallel, ""
    available = config.parallel.among(among)

    def check(layout: Axes) -> None:
        if max(layout.expert, layout.tensor, layout.context) > 1 or layout.offload:
            trace_memory_needs(config, layout, available)

    needs = trace_memory_needs(config, Axes(), available[:1])
    return config.parallel.choose(needs, available, check)


def trace_memory_needs(config: RunConfig, layout: Axes, devices: Sequence[Device]) -> MemoryNeeds:
    """Return the memory needs of a step, its model and loss traced under this layout.

    Raises:
        ShardingError: if an axis of the layout is of no use to it, or does not divide it.
        UserError: as `set_up`.
    """
    strategy = dataclasses.replace(layout, devices=0).build(devices)
    run = resolve_durations(config, lambda values: build_experiment(values, strategy.placement))
    config, x = run.config, run.experiment
    abstract_state = trace_state(config, x)
    args, loss = _loss(config, x, abstract_state)
    largest = largest_remat_region(loss, *args)
    rows = config.batch // config.microbatches
    weights_of = [of for of in largest.given if rows not in of.shape[:1]]
    needs = MemoryNeeds(
        state=abstract_state,
        dims=x.dims,
        rows=rows,
        microbatches=config.microbatches,
        tokens=x.tokens,
        compute=config.precision.compute,
        saved=saved_residuals(loss, *args),
        passing=largest.saved_bytes,
        gathered=sum(map(num_bytes, weights_of)),
    )
    strategy.check_axes_used(abstract_state, x.dims)
    return needs


def _loss(config: RunConfig, x: Experiment, abstract_state: TrainState) -> tuple[tuple, Callable]:
    """Return the shapes of the loss's arguments for a microbatch, and the loss as a scalar."""
    terms = normalize_loss(x.loss, ragged=x.train.ragged)
    rows = shapes(x.train, parts=config.microbatches)
    copy = jax.eval_shape(lambda p: cast_params(p, config.precision.compute), abstract_state.params)
    key = jax.eval_shape(TrainState.step_key, abstract_state)

    def loss(params: Any, extra: Any, batch: Any, rng: Any) -> Any:
        return combine(terms(params, extra, batch, rng).terms)

    return (copy, abstract_state.extra, rows, key), loss
