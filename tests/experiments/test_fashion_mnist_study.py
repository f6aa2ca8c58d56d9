"""Clothes, experiments/fashion_mnist.py: any network over images, and what it carries beside."""

from pathlib import Path

import jax
import pytest
from image_files import write_fashion_mnist
from quick_study import config_of, trained

from jtrain.core.placement import Unplaced
from jtrain.core.pytree import named_leaves

pytestmark = pytest.mark.thorough

CONFIGS = Path(__file__).parents[2] / "configs"
SMALL_RESNET = ("model.preset=none", "model.blocks=[1]", "model.width=4")


@pytest.fixture(autouse=True)
def _data(home: Path, monkeypatch: pytest.MonkeyPatch):
    folder = write_fashion_mnist(home / "fashion-mnist", train=80, test=20)
    monkeypatch.setenv("JTRAIN_DATA", str(folder.parent))


def count(config) -> int:
    params, _ = jax.eval_shape(config.build(Unplaced()).init, jax.random.key(0))
    return sum(leaf.size for leaf in named_leaves(params).values())


def test_the_network_has_fewer_than_a_hundred_thousand_parameters():
    path = CONFIGS / "fashion_mnist.yaml"
    size = count(config_of(path))
    assert size < 100_000
    assert f"a network of {size:,} parameters" in path.read_text().splitlines()[0]


def test_resnet_18_is_the_published_one_but_for_stem_and_classes():
    # torchvision's, with a 3x3 stem of one channel, and ten classes of a thousand.
    before, after = 64 * 3 * 7 * 7 + 1000 * 513, 64 * 1 * 3 * 3 + 10 * 513
    assert count(config_of(CONFIGS / "resnet18_fashion.yaml")) == 11_689_512 - before + after


def test_learns_the_bands_of_made_up_clothes():
    small = ("steps=40", "batch=40", "model.channels=[8, 8]", "model.dropout=0")
    ends = ("evaluate.every=0", "evaluate.batch=20", "checkpoint.every=0")
    outcome = trained(CONFIGS / "fashion_mnist.yaml", *small, *ends, "parallel={kind: single}")
    assert outcome.results[40]["accuracy"] > 0.8


def test_batch_norm_carries_its_statistics_and_says_that_rows_meet():
    config = config_of(CONFIGS / "resnet18_fashion.yaml", [*SMALL_RESNET, "batch=8"])
    x = config.build(Unplaced())
    assert x.couples == "batch"
    params, extra = x.init(jax.random.key(0))
    _, _, after = jax.jit(x.loss.loss)(params, extra, x.train[0], jax.random.key(1))
    changed = named_leaves(after)
    assert any(name.startswith("norm/mean") for name in changed)
    _, _, same = jax.jit(x.loss.loss)(params, extra, x.train[0], None)
    for name, leaf in named_leaves(same).items():
        assert (leaf == named_leaves(extra)[name]).all()


def test_augments_what_is_trained_on_and_nothing_else():
    built = lambda *changes: config_of(
        CONFIGS / "fashion_mnist.yaml",
        ["batch=8", "model.channels=[4]", "data.augment.crop=0", *changes],
    ).build(Unplaced())
    plain, flipped = built("data.augment.flip=0"), built("data.augment.flip=1")
    assert (flipped.train[0]["image"] == plain.train[0]["image"][:, :, ::-1]).all()
    assert (flipped.valid[0]["image"] == plain.valid[0]["image"]).all()


def test_images_that_are_mixed_have_the_chances_of_both_as_labels():
    path = CONFIGS / "fashion_mnist.yaml"
    x = config_of(path, ["batch=8", "model.channels=[4]", "data.augment.mixup=0.2"]).build(
        Unplaced()
    )
    params, extra = x.init(jax.random.key(0))
    loss = jax.jit(lambda batch: x.loss.loss(params, extra, batch, None)[0])
    batch = x.train[0]
    assert loss(batch).total != loss(batch | {"chances": batch["chances"][::-1]}).total
    assert "chances" not in x.valid[0]
    assert loss(x.valid[0]).weight > 0
