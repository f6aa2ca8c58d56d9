"""Checks of a plan before any process starts: what does not suit parameter servers is refused."""

import jax
import jax.numpy as jnp
import numpy as np
import optax

from jtrain.config.sections import SkipPolicy
from jtrain.core.extra_arguments import with_named_arguments
from jtrain.core.pytree import named_leaves, norm
from jtrain.core.types import Params
from jtrain.errors import ConfigError, DataError, ShardingError
from jtrain.optim import WithEvalParams
from jtrain.parallel import check_divides
from jtrain.parallel.strategies.server_modes import StreamingDiLoCo, Sync, splits_rows
from jtrain.server.partition import Partition
from jtrain.server.plan import Plan, shapes_of

APART = 1e-5  # relative difference of an update that is computed in parts, from rounding alone
LARGE = 1e3  # times a gradient whose numbers are about 1: what bounds a gradient bounds this one


def check_plan(plan: Plan) -> None:
    """Check that a run suits its mode.

    Raises:
        ConfigError: with the value to change.
        DataError: if the data has no rows for a worker.
        ShardingError: if the optimizer cannot be split.
    """
    _check_config(plan)
    for name, leaf in named_leaves(plan.abstract_state.params).items():
        if jnp.iscomplexobj(leaf):
            raise ConfigError(
                f"servers send real numbers, and {name} holds {leaf.dtype}. Set "
                f"parallel.kind=mirrored, or give the real and the imaginary part as two "
                f"parameters."
            )
    mode = plan.server.mode
    if splits_rows(mode):
        _check_rows(plan)
    if plan.is_local:
        _check_local(plan)
    if isinstance(mode, StreamingDiLoCo):
        _check_streaming(plan)
    if isinstance(mode, Sync) and mode.backups:
        _check_terms(plan, mode.backups)
    _check_update(plan)
    if plan.server.shards > 1:
        check_splits(plan.optimizer, plan.abstract_state.params, plan.partition)


def _check_config(plan: Plan) -> None:
    config, mode = plan.program.resolved.config, plan.server.mode
    if config.checks.recompute:
        raise ConfigError(
            "checks.recompute computes steps of one program twice, and parallel.kind=server has "
            "none. Set checks.recompute=0."
        )
    if config.workers.count:
        raise ConfigError(
            f"workers.count={config.workers.count}: the workers of parallel.kind=server read their "
            f"own batches, each in its own process. Set workers.count=0, and parallel.workers to "
            f"read and compute in more processes."
        )
    if not isinstance(config.guard, SkipPolicy):
        raise ConfigError(
            f"guard.kind={config.guard.kind} needs the state of each step, which "
            f"parallel.kind=server fetches only for evaluations and checkpoints. Set "
            f"guard.kind=skip."
        )
    if not plan.is_local or isinstance(mode, StreamingDiLoCo):
        return  # a worker of streaming_diloco has its own state in a checkpoint at any step
    for key, steps in {
        "evaluate.every": config.evaluate.every,
        "checkpoint.every": config.checkpoint.every,
        "log.pictures": config.log.pictures,
        "sample.every": config.sample.every,
    }.items():
        if steps % plan.inner_steps:
            near = -(-steps // plan.inner_steps) * plan.inner_steps
            raise ConfigError(
                f"{key}={steps} is not a multiple of parallel.mode.inner_steps={plan.inner_steps}, "
                f"after which the workers of {mode.kind} have one state. Nearest: {key}={near}."
            )


def _check_rows(plan: Plan) -> None:
    config, workers = plan.program.resolved.config, plan.server.workers
    try:
        check_divides(config.batch, workers, config.microbatches)
        plan.program.resolved.experiment.train.shard(workers - 1, workers)
    except ConfigError as error:
        raise ConfigError(
            f"{str(error).replace('devices', 'workers')} Or take parallel.workers=1, or "
            f"parallel.mode.kind=async, whose workers take whole batches."
        ) from None
    except DataError as error:
        raise DataError(
            f"parallel.workers={workers}, each of which is a process that reads its rows: {error} "
            f"Or take parallel.mode.kind=async, whose workers read whole batches."
        ) from None


def _check_update(plan: Plan) -> None:
    """Check that the servers' optimizer needs a gradient and its norm, and no evaluations."""
    update = with_named_arguments(plan.optimizer).update

    def take(params: Params):
        known = {"value": jnp.float32(1), "grad": params, "grad_norm": jnp.float32(1)}
        return update(params, plan.optimizer.init(params), params, **known)

    try:
        jax.eval_shape(take, plan.abstract_state.params)
    except (TypeError, ValueError) as error:
        raise ConfigError(
            f"this optimizer evaluates the loss while it updates, and servers have none: {error}. "
            f"Set parallel.mode.kind=local_sgd, whose workers take steps of their own, or "
            f"parallel.kind=single."
        ) from None


def _check_local(plan: Plan) -> None:
    kind = plan.server.mode.kind
    if jax.tree.leaves(plan.abstract_state.scale):
        raise ConfigError(
            f"parallel.mode.kind={kind}: each worker would adapt a loss scale of its own. Set "
            f"precision.kind=bf16 or f32."
        )
    if isinstance(plan.inner_rule, WithEvalParams):
        raise ConfigError(
            f"parallel.mode.kind={kind}: the average of the parameters that this optimizer "
            f"evaluates with would be another in each worker. Set optimizer.ema=0, or "
            f"parallel.mode.kind=sync."
        )


def _check_streaming(plan: Plan) -> None:
    schedule = plan.fragment_schedule
    apart = schedule.overlap + 1  # steps between two pushes, at least
    if schedule.fragments > schedule.inner_steps:
        raise ConfigError(
            f"parallel.mode.inner_steps={schedule.inner_steps} are fewer than the "
            f"{schedule.fragments} fragments, which are pushed after different steps. Set "
            f"parallel.mode.inner_steps={schedule.fragments * apart}, or parallel.mode.fragments="
            f"{max(schedule.inner_steps // apart, 1)}."
        )
    if schedule.shortest < apart:
        raise ConfigError(
            f"parallel.mode.overlap={schedule.overlap}: {schedule.fragments} fragments of "
            f"{schedule.inner_steps} inner steps are pushed {schedule.shortest} steps apart, and a "
            f"fragment is merged before the next one is pushed. Set parallel.mode.overlap="
            f"{schedule.shortest - 1}."
        )
    if jax.tree.leaves(plan.abstract_state.extra):
        raise ConfigError(
            "parallel.mode.kind=streaming_diloco averages parameters only, and this loss has other "
            "state, such as the statistics of batch norm. Set parallel.mode.kind=diloco."
        )


def _check_terms(plan: Plan, backups: int) -> None:
    batch = shapes_of(plan.program.batches().train[0])
    terms = len(jax.eval_shape(plan.programs.weights, plan.abstract_state, batch))
    if terms > 1:
        raise ConfigError(
            f"parallel.mode.backups={backups}: the loss has {terms} terms, each with a weight of "
            f"its own, and a gradient whose slowest shares are left out can be divided by one "
            f"weight only. Set parallel.mode.backups=0."
        )


def check_splits(
    optimizer: optax.GradientTransformation, params: Params, partition: Partition
) -> None:
    """Check that an optimizer takes the same step in parts, by taking two steps both ways.

    The gradient of the second is so large that a norm which bounds it does.

    Raises:
        ShardingError: if it needs whole arrays, all arrays, or the loss itself.
    """
    draws = np.random.default_rng(0)
    random = lambda leaf: draws.standard_normal(leaf.shape, np.float32).astype(leaf.dtype)
    before = weights = jax.tree.map(random, params)
    steps = [jax.tree.map(random, params) for _ in range(2)]
    steps[1] = jax.tree.map(lambda x: x * x.dtype.type(LARGE), steps[1])
    norms = [norm(grads) for grads in steps]
    whole = _walk(optimizer, weights, steps, norms)
    count, of = len(partition.shards), partition.of_params
    parts = [
        _walk(optimizer, of(weights, i), [of(grads, i) for grads in steps], norms)
        for i in range(count)
    ]
    distance = lambda a, b: norm(jax.tree.map(lambda x, y: np.asarray(x) - np.asarray(y), a, b))
    for step, after in enumerate(whole):
        joined = partition.join(params, [jax.tree.leaves(part[step]) for part in parts])
        if not distance(after, joined) <= APART * distance(after, before):
            raise ShardingError(
                f"this optimizer takes another step where the parameters are split over "
                f"parallel.shards={count}: it needs whole matrices, or a norm over all of them "
                f"that is not `optimizer.clip` alone. Set parallel.shards=1."
            )
        before = after


def _walk(
    optimizer: optax.GradientTransformation, params: Params, steps: list, norms: list
) -> list[Params]:
    """Return the parameters after each step."""
    update = with_named_arguments(optimizer).update

    @jax.jit
    def take(params: Params, state: optax.OptState, grads: Params, size: jax.Array):
        known = {"value": jnp.float32(1), "grad": grads, "grad_norm": size}
        updates, state = update(grads, state, params, **known)
        return optax.apply_updates(params, optax.tree.cast_like(updates, params)), state

    state, after = optimizer.init(jax.tree.map(jnp.asarray, params)), []
    try:
        for grads, size in zip(steps, norms, strict=True):
            params, state = take(params, state, grads, size)
            after.append(params)
    except (TypeError, ValueError, ZeroDivisionError) as error:
        raise ShardingError(
            f"this optimizer cannot update a part of the parameters, for parallel.shards > 1: "
            f"{error}. Set parallel.shards=1."
        ) from None
    return after
