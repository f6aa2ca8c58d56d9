"""jtrain's core rebuilt from `jax` and `optax` alone: the two agree to 1e-6.

Read it from top to bottom. `python docs/from_scratch.py` runs it in a few seconds, on a CPU that is
split into eight devices. Each chapter names the file of jtrain that does the same with more care.
"""

import os

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=8")

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

# 1. A problem in which splitting matters
#
# Rows have weights, and a mask hides some rows: the end of a data set that fills no batch, or
# documents that are too short. So the slices of a batch have different weights.

random = np.random.default_rng(0)
SIZE, STEPS = 64, 5
rows = {
    "x": random.normal(size=(300, 16)).astype(np.float32),
    "y": random.normal(size=300).astype(np.float32),
    "weight": random.exponential(size=300).astype(np.float32),
}


def batch_of(step):
    """64 rows from the number of the step alone: all that a run needs to resume at step 1000."""
    of_step = np.random.default_rng([1, step])
    chosen = {name: array[of_step.integers(300, size=SIZE)] for name, array in rows.items()}
    return {**chosen, "mask": of_step.random(SIZE) < 0.7}


def init(key):
    """The parameters of a small network."""
    up, down = jax.random.split(key)
    return {
        "up": jax.random.normal(up, (16, 64)) / 4,
        "down": jax.random.normal(down, (64, 1)) / 8,
    }


# 2. What a loss returns: sums (jtrain/core/types.py)
#
# Means over different rows cannot be added; sums can. So a loss returns, for each of its terms, a
# coefficient, a sum over rows and the weight to divide the sum by, and divides nothing. Here the
# terms are the squared error, each row with its own weight, and a tenth of the mean square of the
# hidden units, all rows with equal weight. Neither weight depends on the parameters.


def loss(params, batch):
    """The terms of the loss over any rows: (coefficient, total, weight) of each."""
    hidden = jnp.tanh(batch["x"] @ params["up"])  # b f
    error = (hidden @ params["down"])[:, 0] - batch["y"]  # b
    weight = jnp.where(batch["mask"], batch["weight"], 0)
    activity = jnp.where(batch["mask"], jnp.square(hidden).mean(1), 0)
    return [
        (1.0, (jnp.square(error) * weight).sum(), weight.sum()),
        (0.1, activity.sum(), batch["mask"].sum().astype(jnp.float32)),
    ]


# 3. Sums over microbatches (jtrain/core/accumulate.py)
#
# If a function returns sums over rows, its sum over slices is its value for the whole batch.
# Slice i takes rows i, i + n, i + 2n, ...: if it took neighbouring rows, the rows of a batch that
# is split over devices would have to move from one device to another.


def accumulate(fn, microbatches):
    """`batch -> fn(batch)`, one slice of the rows at a time."""

    def summed(batch):
        slices = jax.tree.map(
            lambda x: x.reshape(-1, microbatches, *x.shape[1:]).swapaxes(0, 1), batch
        )
        first = jax.tree.map(lambda x: x[0], slices)
        zeros = jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), jax.eval_shape(fn, first))
        add = lambda total, part: (jax.tree.map(jnp.add, total, fn(part)), None)
        return jax.lax.scan(add, zeros, slices)[0]

    return summed


# 4. The step: weights first (jtrain/core/step.py)
#
# With one term, a step could sum its gradient and divide at the end. With two terms, each has its
# own divisor, and dividing at the end would need a gradient for each term. But weights depend on
# the batch alone. So the step sums the weights first, over the whole batch, and then
# differentiates what each slice adds to the loss of the whole batch: one gradient for any number
# of terms. `psum`, the sum over devices, is all that the step knows of devices. The first pass
# costs almost nothing: the compiler sees that no parameter enters a weight, and drops the network
# from it.
#
# If the gradient is not finite, the old state stays. This is a branch, not a `jnp.where` of each
# leaf, because for a select XLA copies the whole state on a CPU (docs/decisions.md).


def make_step(optimizer, microbatches=1, psum=lambda tree: tree):
    """`(state, batch) -> (state, loss)`, pure; the same function under every layout below."""

    def step(state, batch):
        def whole(fn):
            return psum(accumulate(fn, microbatches)(batch))

        params, opt_state = state
        weights = whole(lambda part: [weight for _, _, weight in loss(params, part)])

        def share(params, part):
            terms = zip(loss(params, part), weights, strict=True)
            return sum(c * total / jnp.where(w > 0, w, 1) for (c, total, _), w in terms)

        value, grads = whole(lambda part: jax.value_and_grad(share)(params, part))

        take = lambda: optimizer.update(grads, opt_state, params)
        stay = lambda: (jax.tree.map(jnp.zeros_like, params), opt_state)
        finite = jnp.isfinite(value) & jnp.isfinite(optax.tree.norm(grads))
        updates, opt_state = jax.lax.cond(finite, take, stay)
        return (optax.apply_updates(params, updates), opt_state), value

    return step


# 5. One device, whole batches: the reference
#
# The state is donated: the new state reuses the memory of the old one.

optimizer = optax.sgd(0.1, momentum=0.9)


@jax.jit
def start():
    """The state before the first step."""
    params = init(jax.random.key(0))
    return params, optimizer.init(params)


def walk(step, state):
    """The losses of some steps and the parameters after them."""
    losses = []
    for number in range(STEPS):
        state, value = step(state, batch_of(number))
        losses.append(value)
    return jax.device_get((losses, state[0]))


def apart(one, other):
    """The norm of the difference over the norm, over all leaves together."""
    pairs = list(zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True))
    difference = sum(np.sum(np.square(np.float64(a) - b)) for a, b in pairs)
    return (difference / sum(np.sum(np.square(np.float64(b))) for _, b in pairs)) ** 0.5


alone = walk(jax.jit(make_step(optimizer), donate_argnums=0), start())
walks = {"microbatches": walk(jax.jit(make_step(optimizer, 4), donate_argnums=0), start())}

# 6. Data parallel: copies of the step (jtrain/parallel/strategies/mirrored.py)
#
# `shard_map` runs the step on every device with its part of the rows, and `psum` adds their sums.
# All devices reach the same state, because all add the same sums. A microbatch is then a slice of
# a device's part, which changes nothing.

mesh = jax.make_mesh((8,), ("data",), axis_types=(AxisType.Auto,))
copies = jax.shard_map(
    make_step(optimizer, 4, psum=functools.partial(jax.lax.psum, axis_name="data")),
    mesh=mesh,
    in_specs=(P(), P("data")),
    out_specs=P(),
    check_vma=False,
)
walks["shard_map"] = walk(jax.jit(copies, donate_argnums=0), start())

# 7. FSDP: the same step, and where its arrays live (jtrain/parallel/strategies/sharded.py)
#
# Nothing in the step changes. Each leaf of the state, including the optimizer's, is split over the
# devices along its largest dim that they divide. The compiler sees the shardings of inputs and
# outputs, gathers the parameters where they are used, and sums the gradients back to their shards.
# The state is created in shards: no device ever holds the whole of it.


def split(leaf):
    """The sharding of a leaf."""
    fits = [dim for dim, size in enumerate(leaf.shape) if size % 8 == 0]
    largest = max(fits, key=lambda dim: leaf.shape[dim], default=None)
    spec = P() if largest is None else P(*[None] * largest, "data")
    return NamedSharding(mesh, spec)


shardings = jax.tree.map(split, jax.eval_shape(start))
fsdp = jax.jit(
    make_step(optimizer, 4),
    in_shardings=(shardings, NamedSharding(mesh, P("data"))),
    out_shardings=(shardings, NamedSharding(mesh, P())),
    donate_argnums=0,
)
state = jax.jit(start, out_shardings=shardings)()
assert state[0]["up"].addressable_shards[0].data.shape == (16, 8), "each device holds an eighth"
walks["fsdp"] = walk(fsdp, state)

for name, there in walks.items():
    assert apart(there, alone) < 1e-6, f"{name}: another result than on one device"

# 8. Exact evaluation (jtrain/core/evaluate.py)
#
# 300 rows are four batches of 64 and 44 more rows. The last batch is padded under its mask, so
# that one compiled program serves all batches. Sums are added on the host, in float64, and
# divided at the end. No row is dropped and none counts twice.


def in_order():
    """All rows once, as batches of 64."""
    for first in range(0, 300, SIZE):
        places = np.arange(first, first + SIZE)
        chosen = {name: array[np.minimum(places, 299)] for name, array in rows.items()}
        yield {**chosen, "mask": places < 300}


def evaluate(params):
    """The loss over the whole data set."""
    found = [jax.device_get(program(params, batch)) for batch in in_order()]
    sums = np.sum(np.float64(found), axis=0)  # terms by (coefficient, total, weight)
    return sum(c / len(found) * total / weight for c, total, weight in sums)


program = jax.jit(loss)
params = alone[1]
everything = jax.device_get(program(params, {**rows, "mask": np.ones(300, bool)}))
assert np.isclose(evaluate(params), sum(c * t / w for c, t, w in everything), rtol=1e-6)

# 9. jtrain does the same
#
# The same loss written for jtrain, the same optimizer, and the same three layouts.

import jtrain as jt
from jtrain.parallel import FSDP, Mirrored, Single


def same_loss(params, batch, rng):
    """The loss of chapter 2; it draws no random numbers."""
    del rng
    hidden = jnp.tanh(batch["x"] @ params["up"])
    error = (hidden @ params["down"])[:, 0] - batch["y"]
    fit = jt.Mean.of(jnp.square(error), batch["mask"], batch["weight"])
    return fit + 0.1 * jt.Mean.of(jnp.square(hidden).mean(1), batch["mask"])


def walk_with_jtrain(values):
    """As `walk`, under the strategy that config values stand for."""
    strategy = values.build()
    new = lambda: jt.new_state(init(jax.random.key(0)), optimizer, jax.random.key(1))
    state = jax.jit(new, out_shardings=strategy.shardings(jax.eval_shape(new)))()
    place = lambda step: strategy.place({**batch_of(step), "row": np.arange(SIZE, dtype=np.int32)})
    step = jt.make_step(same_loss, optimizer, microbatches=4, psum=strategy.psum, ragged=True)
    step = strategy.compile(step, state, place(0), returns_state=True)
    losses = []
    for number in range(STEPS):
        state, metrics = step(state, place(number))
        losses.append(metrics["loss"].total)
    return jax.device_get((losses, state.params))


theirs = {
    "microbatches": Single(),
    "shard_map": Mirrored(impl="shard_map", devices=8),
    "fsdp": FSDP(devices=8, min_size=0),
}
for name, values in theirs.items():
    distance = apart(walk_with_jtrain(values), walks[name])
    assert distance < 1e-6, f"{name}: jtrain comes to another result"
    print(f"{name:12}  jtrain is {distance:.1e} away")

found = jt.evaluate(same_loss, params, rows, batch=SIZE)
assert found["rows"] == 300
assert np.isclose(found["loss"], evaluate(params), rtol=1e-6)
print(f"evaluation    {found['loss']:.6f} over {found['rows']} rows, {evaluate(params):.6f} here")
