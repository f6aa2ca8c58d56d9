"""Residual networks: published sizes, statistics over hidden rows, and what is refused."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from comparison import assert_close, assert_leaves_close

import jtrain as jt
from jtrain.core.placement import Unplaced
from jtrain.core.pytree import named_leaves, num_elements
from jtrain.errors import ConfigError, LossError
from jtrain.losses.cross_entropy import cross_entropy
from jtrain.models.resnet import ResNet

SMALL = {"image": (6, 6, 2), "width": 4, "stem": "cifar", "classes": 3}
# torchvision's: https://docs.pytorch.org/vision/stable/models.html
PUBLISHED = {"resnet18": 11_689_512, "resnet34": 21_797_672, "resnet50": 25_557_032}


@pytest.mark.thorough
@pytest.mark.parametrize("name", PUBLISHED)
def test_has_as_many_parameters_as_were_published(name):
    params, extra = jax.eval_shape(ResNet(preset=name).build().init, jax.random.key(0))
    assert num_elements(params) == PUBLISHED[name]
    norms = [leaf for path, leaf in named_leaves(params).items() if path.endswith("scale")]
    assert num_elements(extra) == 2 * num_elements(norms)


def test_values_beside_a_preset_win():
    values = ResNet(preset="resnet50", classes=10, stem="cifar")
    assert (values.classes, values.stem, values.bottleneck) == (10, "cifar", True)


def test_an_unknown_preset_is_told_with_the_nearest():
    with pytest.raises(ValueError, match=r"no preset 'resnet51', .*Did you mean preset=resnet50"):
        ResNet(preset="resnet51")
    assert ResNet(preset="resnet50")


def test_groups_that_do_not_divide_are_refused():
    with pytest.raises(ValueError, match=r"12 channels .* into 32 groups. Nearest: groups=12"):
        ResNet(norm="group", width=12)
    assert ResNet(norm="group", width=12, groups=12)


def test_a_size_that_nobody_gave_is_refused():
    with pytest.raises(ConfigError, match=r"image=\[0, 0, 0\] and classes=0.*Set model\.image="):
        ResNet().build()


def test_the_imagenet_stem_quarters_and_each_stage_halves():
    sizes = []

    class Sizes(Unplaced):
        def constrain(self, x, *dims):
            sizes.append(x.shape[1:])
            return x

    model = ResNet(image=(30, 32, 3), blocks=(1, 1), width=4, classes=3).build(Sizes())
    params, extra = jax.eval_shape(model.init, jax.random.key(0))
    x = jnp.zeros((2, 30, 32, 3))
    jax.eval_shape(lambda p, e: model.apply(p, e, x), params, extra)
    assert sizes[0] == (8, 8, 4)
    assert sizes[-3:] == [(4, 4, 8), (8,), (3,)]


@pytest.mark.thorough
def test_a_quiet_block_starts_as_the_identity():
    model = ResNet(**SMALL, norm="group", groups=2, quiet=True, blocks=(2,)).build()
    x = jnp.asarray(np.random.default_rng(0).standard_normal((2, 6, 6, 2)), jnp.float32)
    params, _ = jax.jit(model.init)(jax.random.key(0))
    of = jax.jit(lambda params: model.apply(params, {}, x, train=True)[0])
    other = {**params, "blocks": jax.tree.map(lambda leaf: leaf * 3, params["blocks"])}
    np.testing.assert_array_equal(of(params), of(other))
    loud = jax.tree.map(lambda leaf: leaf + 0.1, params["blocks"])
    assert np.abs(of(params) - of({**params, "blocks": loud})).max() > 1e-6


def classify(values):
    """Compute the loss of docs/vision.md."""
    model = values.build()

    def loss(params, extra, batch, rng):
        keys, mask = jt.row_keys(rng, batch), batch["mask"]
        logits, extra = model.apply(params, extra, batch["image"], mask=mask, rng=keys)
        return *cross_entropy(logits, batch["label"], batch["mask"]), extra

    return model, jt.stateful(loss)


def batch_of(rows, hidden):
    draw = np.random.default_rng(0)
    image = draw.standard_normal((rows, 6, 6, 2)).astype(np.float32)
    label = draw.integers(0, 3, rows).astype(np.int32)
    image[rows - hidden :] = np.nan
    mask = np.arange(rows) < rows - hidden
    return {"image": image, "label": label, "row": np.arange(rows, dtype=np.int32), "mask": mask}


@pytest.mark.thorough
def test_a_padded_batch_takes_the_step_of_its_real_rows():
    values, optimizer = ResNet(**SMALL, blocks=(1,)), optax.sgd(0.1)
    model, loss = classify(values)
    params, extra = jax.jit(model.init)(jax.random.key(0))
    step = jax.jit(jt.make_step(loss, optimizer, couples=values.couples, ragged=True))
    padded, real = batch_of(8, hidden=3), {k: v[:5] for k, v in batch_of(8, hidden=3).items()}
    start = jt.new_state(params, optimizer, jax.random.key(1), extra)
    (got, metrics), (want, expected) = step(start, padded), step(start, real)
    assert_close(metrics["loss"].value(), expected["loss"].value(), 1e-6)
    assert_leaves_close((got.params, got.extra), (want.params, want.extra), 1e-5)
    assert any(np.abs(leaf).max() > 1e-3 for leaf in jax.tree.leaves(got.extra["norm"]["mean"]))


def test_rows_that_meet_are_not_split_and_group_norm_is_advised():
    _, loss = classify(ResNet(**SMALL, blocks=(1,)))
    couples = ResNet(**SMALL).couples
    assert couples == "batch"
    for split in ({"microbatches": 2}, {"psum": lambda tree: tree}):
        with pytest.raises(LossError, match=r"couples the rows.*model\.norm=group"):
            jt.make_step(loss, optax.sgd(0.1), couples=couples, **split)
        free = ResNet(**SMALL, norm="group", groups=2)
        assert free.couples == "nothing"
        assert jt.make_step(classify(free)[1], optax.sgd(0.1), couples=free.couples, **split)
