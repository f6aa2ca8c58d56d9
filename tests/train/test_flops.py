"""The work of a step by its products, what it keeps, its sizes, and what is frozen."""

import math
import re
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from comparison import assert_close, assert_leaves_close, bitwise
from jax import lax
from jax.extend.core import Primitive
from quick_study import CODE, config_of, trained

import jtrain as jt
from jtrain.models.classifiers import CNN
from jtrain.models.transformer import Transformer
from jtrain.train.auto_layout import largest_remat_region, saved_residuals
from jtrain.train.flops import count_flops, count_model_flops
from jtrain.train.hooks.step_record import read_step_records
from jtrain.train.program import set_up
from jtrain.train.summary import count_step_flops, summarize

LEFT, RIGHT = jnp.zeros((3, 4)), jnp.zeros((4, 5))
IMAGE, KERNEL = jnp.zeros((2, 8, 8, 6)), jnp.zeros((3, 3, 3, 10))
NHWC = ("NHWC", "HWIO", "NHWC")


def convolve(x, primitive, stride=1):
    return lax.conv_general_dilated(
        x, primitive, (stride, stride), "VALID", dimension_numbers=NHWC, feature_group_count=2
    )


def stacked(x, kernels, *, unroll):
    body = lambda x, primitive: (jnp.tanh(x @ primitive), None)
    return lax.scan(body, x, kernels, unroll=unroll)[0].sum()


def test_a_matrix_product_is_two_operations_for_each_pair():
    assert count_flops(jnp.matmul, LEFT, RIGHT) == 2 * 3 * 4 * 5
    batched = lambda a, b: jnp.einsum("nij,njk->nik", a, b)
    assert count_flops(batched, jnp.zeros((7, 3, 4)), jnp.zeros((7, 4, 5))) == 7 * 2 * 3 * 4 * 5
    assert count_flops(jnp.tanh, LEFT) == 0


def test_a_convolution_counts_the_taps_of_its_group():
    assert count_flops(convolve, IMAGE, KERNEL) == 2 * (2 * 6 * 6 * 10) * (3 * 3 * 3)


@pytest.mark.parametrize("fn", [lambda f: f, jax.grad], ids=["value", "gradient"])
def test_a_scan_counts_as_often_as_it_runs(fn):
    x, kernels = jnp.zeros((16, 32)), jnp.zeros((6, 32, 32))
    looped = count_flops(fn(lambda k: stacked(x, k, unroll=1)), kernels)
    # XLA counts the products of what is written out, and the few operations between them.
    lowered = jax.jit(fn(lambda k: stacked(x, k, unroll=True))).lower(kernels)
    assert looped == pytest.approx(lowered.cost_analysis()["flops"], rel=0.1)


B, T, VOCAB, WIDTH, LAYERS = 2, 16, 32, 16, 3


def shapes(*dims):
    return jax.ShapeDtypeStruct(dims, jnp.float32)


def total(model, **options):
    """A loss of a model: the sum of its outputs' squares."""

    def loss(params, extra, *inputs):
        outputs, _ = model.apply(params, extra, *inputs, **options)
        outputs = outputs[0] if isinstance(outputs, tuple) else outputs
        return jnp.square(outputs).sum()

    return loss


def counted(model, *inputs):
    params, extra = jax.eval_shape(model.init, jax.random.key(0))
    loss = total(model)
    model_flops = count_model_flops(loss, params, extra, *inputs)
    return model_flops, count_flops(jax.grad(loss), params, extra, *inputs)


def test_convolutions():
    model = CNN(image=(8, 8, 3), channels=(4, 6), classes=5).build()
    # 3x3 kernels at 8x8 and 4x4 places, a map of 2x2x6 to the classes.
    first, second = 2 * (8 * 8) * 9 * 3 * 4, 2 * (4 * 4) * 9 * 4 * 6
    by_hand = 7 * (2 * first + 3 * second + 3 * 2 * (2 * 2 * 6) * 5)
    assert counted(model, shapes(7, 8, 8, 3))[0] == by_hand


def transformer(**changes):
    sizes = {"vocab": VOCAB, "context": T, "layers": LAYERS, "heads": 4, "width": WIDTH}
    return Transformer(**{**sizes, **changes}).build()


def transformer_flops(*, hidden=4 * WIDTH, kernels=2, groups=4, head=4, tokens=B * T):
    """Forward pass: maps of queries, keys, values and output, scores and their sums, the MLP."""
    attention = 2 * tokens * WIDTH * head * (4 + 2 * groups + 4) + 2 * 2 * tokens * T * 4 * head
    feed = 2 * tokens * WIDTH * hidden * kernels
    return LAYERS * (attention + feed) + 2 * tokens * WIDTH * VOCAB


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("changes", "options"),
    [
        ({"kv_heads": 2, "activation": "swiglu"}, {"groups": 2, "kernels": 3}),
        ({"scan": True, "remat": "full"}, {}),
        ({"remat": "names", "saved": ("qkv", "attention")}, {}),
    ],
    ids=lambda x: ",".join(x) if isinstance(x, dict) else None,
)
def test_a_transformer(changes, options):
    tokens = jax.ShapeDtypeStruct((B, T), jnp.int32)
    model_flops, hardware = counted(transformer(**changes), tokens)
    # Every factor of every product depends on a parameter: three times the forward pass.
    assert model_flops == 3 * transformer_flops(**options)
    # Computed again: a block without its last product, or what is not saved of it.
    wide = LAYERS * 2 * (B * T) * WIDTH * 4 * WIDTH
    logits = 2 * (B * T) * WIDTH * VOCAB
    scores, out = LAYERS * 2 * B * T * T * WIDTH, LAYERS * 2 * (B * T) * WIDTH * WIDTH
    again = {"full": transformer_flops() - logits - wide, "names": scores + out + wide}
    if (remat := changes.get("remat")) in again:
        assert hardware == model_flops + again[remat]
    else:
        assert hardware < 1.1 * model_flops


def test_what_gets_no_gradient_is_counted_once():
    first, second, x = shapes(8, 16), shapes(16, 4), shapes(32, 8)
    one, two = 2 * 32 * 8 * 16, 2 * 32 * 16 * 4
    frozen = lambda p, q, x: ((x @ q) @ p).sum()
    behind_a_stop = lambda p, q, x: (jax.lax.stop_gradient(x @ q) @ p).sum()
    assert count_model_flops(frozen, second, first, x) == one + 2 * two
    assert count_model_flops(behind_a_stop, second, first, x) == one + 2 * two
    teacher = lambda p, x: ((jax.lax.stop_gradient(x @ p[0]) @ p[1]) @ p[1].T).sum()
    assert count_model_flops(teacher, (first, second), x) == 2 * one + (2 + 3) * two


def test_a_loop_without_a_count_and_an_unknown_kernel_are_unknown():
    kernel, x = shapes(8, 8), shapes(4, 8)
    until = lambda p, x: jax.lax.while_loop(lambda y: y.sum() < 1, lambda y: y @ p, x).sum()
    assert count_model_flops(until, kernel, x) is None
    unknown = Primitive("pallas_call")
    unknown.def_abstract_eval(lambda x, name: x)
    with_kernel = lambda p, x: unknown.bind(x @ p, name="mine").sum()
    assert count_model_flops(with_kernel, kernel, x) is None
    product = 2 * 4 * 8 * 8
    assert count_model_flops(until, kernel, x, lower_bound=True) == 3 * product  # by y and by p
    assert count_model_flops(with_kernel, kernel, x, lower_bound=True) == 2 * product


LAYERS_OF, ROWS = shapes(3, 8, 8), shapes(5, 8)
LAYER = 5 * 8 * 4  # bytes of its output


def layer(x, w):
    return jnp.sin(x @ w), None


def loop(each):
    return lambda w, x: jnp.sum(jax.lax.scan(each, x, w)[0])


def test_a_layer_keeps_its_input_and_what_its_slope_is_computed_from():
    assert saved_residuals(loop(layer), LAYERS_OF, ROWS) == 2 * 3 * LAYER


def test_a_layer_that_is_computed_again_keeps_its_input_alone():
    again = loop(jax.checkpoint(layer))
    assert saved_residuals(again, LAYERS_OF, ROWS) == 3 * LAYER
    part = largest_remat_region(again, LAYERS_OF, ROWS)
    assert part.saved_bytes == LAYER
    assert {of.shape for of in part.given} == {(5, 8), (8, 8)}


FSDP = "parallel={kind: fsdp, devices: 4, min_size: 0}"


@pytest.mark.thorough
def test_sizes_are_those_of_the_arrays(study_home: Path):
    parts = set_up(config_of(study_home, ["model.width=16", FSDP]))
    sizes, state = summarize(parts.resolved.abstract_state), parts.initial_state()
    first = jax.devices()[0]

    def held(tree):
        shards = [s for leaf in jax.tree.leaves(tree) for s in leaf.addressable_shards]
        return sum(s.data.nbytes for s in shards if s.device == first)

    for name, tree in [("params", state.params), ("optimizer", state.opt_state)]:
        part = sizes.parts[name]
        assert part.total == sum(leaf.nbytes for leaf in jax.tree.leaves(tree))
        assert part.device == held(tree)
    assert sizes.parts["params"].device < sizes.parts["params"].total
    assert sizes.numbers == 2 * 16 + 16 + 16 * 3
    assert {leaf.name: leaf.shape for leaf in sizes.leaves}["up"] == (2, 16)
    assert all(math.prod(leaf.shape) == leaf.numbers for leaf in sizes.leaves)


def test_the_work_is_that_of_the_whole_batch_however_it_is_split(study_home: Path):
    # x W, and its gradient by W alone; h V and its gradients by h and V.
    by_hand = 2 * 16 * (2 * 2 * 8 + 3 * 8 * 3)
    for settings in [], ["microbatches=4"], ["steps_per_call=2", "evaluate.every=4"], [FSDP]:
        changes = [*settings, "checkpoint.every=0", "optimizer.kind=sgd"]
        assert count_step_flops(set_up(config_of(study_home, changes))) == (by_hand, by_hand)


CONFIG = "configs/quick.yaml"
BUILT = "optimizer=self.optimizer.build(self.steps)"
FREEZE = "optimizer.groups=[{match: up, freeze: true}, {match: bias, freeze: true}]"
ROW = {"up": 2 * 2 * 8, "down": 2 * 8 * 3}  # FLOPs of a product and a row


@pytest.fixture
def frozen_home(study_home: Path):
    """Work where the study hands its optimizer on, so that a run knows what is frozen."""
    Path("experiments/quick.py").write_text(CODE.replace(BUILT, "optimizer=self.optimizer"))


@pytest.mark.usefixtures("frozen_home")
def test_no_product_is_computed_for_what_depends_on_frozen_leaves_alone():
    whole, part = (count_step_flops(set_up(config_of(CONFIG, some))) for some in ([], [FREEZE]))
    # Forward, and by each kernel; the derivative by what goes into `down` is for `up`.
    assert whole.model == 16 * (2 * ROW["up"] + 3 * ROW["down"])
    assert part.model == part.hardware == 16 * (ROW["up"] + 2 * ROW["down"])


@pytest.mark.thorough
@pytest.mark.usefixtures("frozen_home")
def test_devices_send_no_gradient_of_frozen_leaves():
    def sent(*settings: str) -> str:
        layout = "parallel={kind: mirrored, impl: shard_map, devices: 2}"
        program = set_up(config_of(CONFIG, [layout, *settings])).lower_step().compile().as_text()
        return " ".join(re.findall(r"= (.*?) all-reduce(?:-start)?\(", program))

    shape = r"f32\[(2,8|8,2)\]"  # of `up`, the only leaf that has it
    assert re.search(shape, sent())
    assert not re.search(shape, sent(FREEZE))


@pytest.mark.thorough
@pytest.mark.usefixtures("frozen_home")
def test_the_others_train_as_where_the_gradients_are_computed_and_dropped():
    part = jt.load(trained(CONFIG, FREEZE).directory.path)
    Path("experiments/whole.py").write_text(CODE)  # builds the transformation by itself
    whole = jt.load(trained(CONFIG, FREEZE, "experiment=whole", "name=whole").directory.path)
    start = set_up(config_of(CONFIG)).initial_state().params
    assert bitwise(part.params["up"], start["up"])
    assert bitwise(part.params["bias"], start["bias"])
    assert not np.array_equal(part.params["down"], start["down"])
    assert_leaves_close(part.params, jax.device_get(whole.params), 1e-5)
    files = (Path(f"runs/{name}/steps.jsonl") for name in ("quick", "whole"))
    ours, theirs = map(read_step_records, files)
    assert len(ours) == len(theirs) == 12
    for step, row in ours.items():
        assert_close(row.loss, theirs[step].loss, 1e-5)
        assert row.grad_norm < theirs[step].grad_norm  # over the leaves that are trained
