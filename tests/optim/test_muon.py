"""Muon's matrices: the singular values, which leaves it takes, and those that are split."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from comparison import distance

import jtrain as jt
from jtrain.core.pytree import named_leaves, num_elements
from jtrain.core.state import new_state
from jtrain.core.step import make_step
from jtrain.inspect.plan.collectives import collectives_of
from jtrain.inspect.plan.hlo import HloProgram
from jtrain.optim import AdamW, Muon
from jtrain.parallel import Axes, Single

pytestmark = pytest.mark.thorough

SHAPES = [(16, 48), (128, 64)]


def direction(gradient: np.ndarray, **values) -> np.ndarray:
    """Return a matrix's first update at a rate of 1, uphill; size sqrt(max) x 1."""
    optimizer = Muon(lr=1.0, rms=1.0, weight_decay=0.0, momentum=0.0, **values).build(1)
    params = {"w": jnp.zeros(gradient.shape)}
    update = jax.jit(optimizer.update)
    updates, _ = update({"w": jnp.asarray(gradient)}, optimizer.init(params), params)
    return -np.asarray(updates["w"]) / max(gradient.shape[-2:]) ** 0.5


def decomposed(gradient: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return singular values over the Frobenius norm, before and after."""
    left, s, right = np.linalg.svd(gradient.astype(np.float64), full_matrices=False)
    turned = left.T @ direction(gradient) @ right.T
    size = np.abs(turned - np.diag(np.diag(turned))).max()
    assert size < 2e-5, "singular vectors stay as they were"
    return s / np.linalg.norm(s), np.diag(turned)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("spread", [0, 2], ids=["as drawn", "over four decades"])
def test_singular_values_are_brought_near_to_one(shape: tuple[int, int], spread: int):
    draw = np.random.default_rng(sum(shape))
    gradient = draw.normal(size=shape)
    if spread:
        left, s, right = np.linalg.svd(gradient, full_matrices=False)
        gradient = (left * np.logspace(-spread, spread, len(s))) @ right
    before, after = decomposed(gradient.astype(np.float32))
    large = before > 0.01
    assert large.any()
    assert spread == 0 or (~large).any(), "both kinds are tried"
    assert after[large].min() >= 0.68
    assert after[large].max() <= 1.14
    # The others are still on their way: the polynomial's slope at zero is 3.4445 an iteration.
    assert after[~large].max(initial=0) <= 1.21
    np.testing.assert_array_less(after[before < 1e-4], 3.4445**5 * before[before < 1e-4] * 1.01)


PARAMS = {
    "tokens": jnp.ones((5, 4)),
    "blocks": {"0": {"kernel": jnp.ones((4, 4)), "bias": jnp.ones(4)}},
    "conv": {"kernel": jnp.ones((3, 3, 2, 2))},
    "head": jnp.ones((5, 4)),
}
OTHERS = {"tokens", "head", "blocks/0/bias", "conv/kernel"}


@pytest.mark.parametrize(
    ("values", "adam"),
    [
        ({}, OTHERS),
        ({"adamw": []}, OTHERS - {"head", "tokens"}),
        ({"stacks": ["conv/*"]}, OTHERS - {"conv/kernel"}),
    ],
)
def test_what_is_no_matrix_inside_takes_the_steps_of_adamw(values, adam: set[str]):
    draw = np.random.default_rng(0)
    gradient = jax.tree.map(lambda p: jnp.float32(draw.normal(size=p.shape)), PARAMS)

    def first(optimizer):
        update = jax.jit(optimizer.update)
        return named_leaves(update(gradient, optimizer.init(PARAMS), PARAMS)[0])

    mine = Muon(lr=0.1, **values).build(3)
    found, wanted = first(mine), first(AdamW(lr=0.1).build(3))
    same = {name for name in found if np.abs(found[name] - wanted[name]).max() < 1e-6}
    assert same == adam
    state = named_leaves(mine.init(PARAMS))
    squares = {name.partition("nu/")[2] for name in state if "/nu/" in name}
    assert squares == adam, "only these have Adam's second moment"


DIMS = {
    "stack": ("layers", "width", "hidden"),  # 8 matrices: enough for 4 devices
    **{f"blocks/{i}/up": ("width", "hidden") for i in range(3)},  # 3 in all: one is filled up
    "out": ("hidden", "width"),
    "experts": ("experts", "width", None),
    "bias": ("width",),
}
SPLIT_SHAPES = {"layers": 8, "width": 16, "hidden": 24, "experts": 4, None: 12}


def params() -> dict:
    """Random leaves of the dims above."""
    draw = np.random.default_rng(0)
    leaf = lambda name: jnp.asarray(
        0.1 * draw.normal(size=[SPLIT_SHAPES[dim] for dim in DIMS[name]]), jnp.float32
    )
    blocks = {f"{i}": {"up": leaf(f"blocks/{i}/up")} for i in range(3)}
    names = [name for name in DIMS if not name.startswith("blocks")]
    return {"blocks": blocks} | {name: leaf(name) for name in names}


def loss(params, batch, rng):
    """A sum of squares of what each leaf makes of a row: no gradient is zero or of rank one."""
    x = batch["x"]
    hidden = jnp.tanh(x @ params["out"].T[:, :16])
    found = x + params["bias"][None]
    for matrix in [*(params["blocks"][f"{i}"]["up"] for i in range(3)), *params["stack"]]:
        found = found + jnp.tanh(found @ matrix)[:, :16]
    for expert in params["experts"]:
        found = found + jnp.pad(jnp.tanh(hidden @ expert), ((0, 0), (0, 4)))
    return jt.Mean.of(jnp.square(found - x[:, ::-1]).sum(-1), batch["mask"])


def rows(count: int = 32) -> dict:
    """A batch."""
    x = np.random.default_rng(1).normal(size=(count, 16)).astype(np.float32)
    return {"x": x, "row": np.arange(count, dtype=np.int32), "mask": np.ones(count, bool)}


def compiled(where, rule):
    """Return the program of a step, and a first state."""
    make = lambda: new_state(params(), rule, jax.random.key(1))
    like = jax.eval_shape(make)
    state = jax.jit(make, out_shardings=where.shardings(like, DIMS))()
    sharding = where.gradient_sharding(like.params, DIMS)
    step = make_step(loss, rule, sharding=sharding)
    return where.lower(step, state, where.place(rows()), returns_state=True).compile(), state


MUON = Muon(lr=0.05, stacks=("stack", "experts"), adamw=())


@pytest.mark.sampled(4)
@pytest.mark.parametrize(
    "layout",
    [
        pytest.param({"fsdp": 4}, id="fsdp"),
        pytest.param({"fsdp": 2, "tensor": 2}, id="both"),
        pytest.param({"fsdp": 2, "expert": 2}, id="experts"),
        pytest.param({"data": 2, "fsdp": 2, "zero": 1}, id="zero 1"),
    ],
)
def test_matrices_that_are_split_take_the_step_of_one_device(layout: dict):
    rule = MUON.build(10, DIMS)
    ends = []
    for parallel in (Single(), Axes(devices=4, min_size=0, **layout)):
        program, state = compiled(where := parallel.build(), rule)
        first = jax.device_get(state.params)
        for _ in range(2):
            state, _ = program(state, where.place(rows()))
        ends.append(jax.device_get(state.params))
    moved = jax.tree.map(lambda a, b: a - b, ends[0], first)
    apart = jax.tree.map(lambda a, b: a - b, ends[1], ends[0])
    # The iterations amplify rounding of small singular values by up to 3.4445**5 a step.
    size = lambda tree: np.sqrt(sum(np.square(leaf).sum() for leaf in jax.tree.leaves(tree)))
    assert size(moved) > 1e-2
    assert size(apart) < 1e-3 * size(moved), distance(*ends)


def test_whole_matrices_cost_one_exchange_there_and_one_back():
    where = Axes(devices=4, fsdp=4, min_size=0).build()

    def sent(rule) -> dict[str, int]:
        program, _ = compiled(where, rule)
        found: dict[str, int] = {}
        text = HloProgram(program.as_text())
        for one in collectives_of(text, dict(where.mesh.shape)).collectives:
            found[one.kind] = found.get(one.kind, 0) + one.sent
        return found

    muon, adamw = sent(MUON.build(10, DIMS)), sent(AdamW(lr=0.05).build(10, DIMS))
    more = sum(muon.values()) - sum(adamw.values())
    elements = num_elements(params()) + 16 * 24  # and the matrix of zeros
    assert 0 < more <= 2 * 4 * elements / 4, "bytes of a device's shard, in float32, twice"
    assert muon["all-to-all"] > adamw.get("all-to-all", 0)
