"""GPT-2 over token files, experiments/language.py, at toy size."""

from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from comparison import assert_close, distance
from quick_study import config_of, trained

import jtrain as jt
from jtrain.core.mean import Terms
from jtrain.core.placement import Unplaced
from jtrain.data.text.prepare import prepare
from jtrain.data.text.tokenizing import ByteTokens
from jtrain.errors import ConfigError
from jtrain.losses.next_token import inputs_and_targets, next_token
from jtrain.models.layers.block_stack import unstack_layers
from jtrain.train.restore_run import complete_prompt
from jtrain.train.setup import set_up

pytestmark = pytest.mark.thorough

CONFIG = Path(__file__).parents[2] / "configs" / "gpt2.yaml"
TOY = (
    "batch=8",
    "microbatches=2",
    "data.context=16",
    "data.validation=0.2",
    "model.context=16",
    "model.layers=1",
    "model.heads=2",
    "model.width=32",
    "model.vocab=0",
    "optimizer.schedule.warmup=2",
    "parallel={kind: single}",
)


@pytest.fixture(autouse=True)
def _data(home: Path):
    (home / "text.txt").write_text("the cat sat on the mat and the rat sat on the cat. " * 40)
    prepare(home / "text.txt", home / "tokens", tokenizing=ByteTokens())


def test_gpt2_has_the_size_that_it_is_called_by():
    config = config_of(CONFIG, ["data.context=16", "data.validation=0.2"])
    params, _ = jax.eval_shape(config.build(Unplaced()).init, jax.random.key(0))
    size = sum(leaf.size for leaf in jax.tree.leaves(params))
    assert 124e6 < size < 125e6


def test_the_loss_is_that_of_all_logits_at_once():
    config = config_of(CONFIG, TOY)
    x = config.build(Unplaced())
    params, _ = x.init(jax.random.key(0))
    batch = x.train[0]
    found, metrics = jax.jit(x.loss)(params, batch, None)
    model = config.model.for_tokens(257).build()
    inputs, targets, real = inputs_and_targets({k: jnp.asarray(v) for k, v in batch.items()})
    logits, _ = jax.jit(lambda p, t: model.apply(p, {}, t))(params, inputs)
    wanted, more = next_token(logits, targets, real)
    assert_close(found.value(), wanted.value(), 1e-5)
    assert metrics["accuracy"].value() == more["accuracy"].value()


def test_packed_rows_keep_their_documents_apart(tmp_path: Path):
    (tmp_path / "lines.txt").write_text("the cat sat.\nthe rat.\non the mat!\n" * 40)
    prepare(tmp_path / "lines.txt", tmp_path / "lines", tokenizing=ByteTokens(), by="line")
    packed = ("data.path=lines", "data.pack=true", "data.context=40", "model.context=40")
    x = config_of(CONFIG, [*TOY, *packed]).build(Unplaced())
    params, _ = x.init(jax.random.key(0))
    params = jax.tree.map(lambda leaf: 9 * leaf, params)  # attention that sees something
    batch = {name: jnp.asarray(array) for name, array in x.train[0].items()}
    assert batch["segments"].max() > 2
    together = batch | {"segments": jnp.ones_like(batch["segments"])}
    found, other = jax.jit(lambda p, *bs: [x.loss(p, b, None)[0] for b in bs])(
        params, batch, together
    )
    across = (jnp.diff(batch["segments"]) > 0).sum()
    assert other.weight - found.weight == across > 8, "no target is across two documents"
    assert abs(other.value() - found.value()) > 1e-3


def test_a_mixture_trains_and_is_judged_by_each_text(home: Path):
    (home / "more.txt").write_text("a dog lay by the door of the house. " * 40)
    prepare(home / "more.txt", home / "more", tokenizing=ByteTokens())
    parts = "{cats: {path: tokens, weight: 3}, dogs: {path: more, weight: 1}}"
    mixed = ("data.kind=mixture", f"data.parts={parts}", "steps=4", "evaluate.every=0")
    outcome = trained(CONFIG, *TOY, *mixed, "evaluate.batch=8", "checkpoint.every=0")
    assert list(outcome.sets) == ["cats", "dogs"]
    assert all(np.isfinite(found[4]["loss"]) for found in outcome.sets.values())


def test_layers_in_a_scan_train_as_layers_written_out():
    """Check a stack of norms: its scales would decay if they counted as a matrix."""
    layers = ("model.layers=2", "microbatches=1", "precision.kind=f32")
    decay = ("steps_per_call=1", "optimizer.weight_decay=1.0", "optimizer.schedule.warmup=0")
    losses, params = {}, {}
    for scan in (False, True):
        parts = set_up(config_of(CONFIG, [*TOY, *layers, *decay, f"model.scan={scan}"]))
        state, step, losses[scan] = parts.fresh(), parts.compile_step(), []
        for batch in (parts.place(parts.experiment.train[i]) for i in range(5)):
            state, metrics = step(state, batch)
            losses[scan].append(metrics["loss"].value())
        params[scan] = unstack_layers(state.params) if scan else state.params
    assert_close(losses[True], losses[False], 1e-6)
    assert distance(params[True], params[False]) < 1e-5


@pytest.mark.parametrize("group", ["row", "batch"])
def test_experts_are_judged_besides_and_a_batch_of_them_meets(group: str):
    experts = f"model.experts={{kind: dropless, count: 4, uneven: 0.5, group: {group}}}"
    x = config_of(CONFIG, [*TOY, "microbatches=1", experts]).build(Unplaced())
    params, _ = x.init(jax.random.key(0))
    terms, metrics = jax.jit(x.loss)(params, x.train[0], None)
    assert isinstance(terms, Terms)
    assert_close(terms.coefficients, (1.0, 0.5, 1e-3), 1e-6)
    assert 0.9 < metrics["balance"].value() < 2  # 4 experts, of which 2 are chosen
    assert set(metrics) == {"accuracy", "cross_entropy", "balance", "router_z"}
    assert x.couples == ("batch" if group == "batch" else "nothing")


@pytest.mark.slow
def test_trains_in_bfloat16_and_writes():
    settings = (*TOY, "steps=30", "optimizer.lr=1e-2", "evaluate.every=0", "checkpoint.every=0")
    outcome = trained(CONFIG, *settings)
    assert outcome.results[30]["loss"] < 4  # 5.5 for one that knows nothing
    config = config_of(CONFIG, settings)
    prompt = jt.Prompt(text="the cat", tokens=20)
    _, text = complete_prompt(config, outcome.directory.path, prompt)
    assert text.startswith("the cat")
    assert len(text) > 7


def test_a_context_beyond_the_models_is_told():
    with pytest.raises(ConfigError, match=r"model.context=32 or data.context=16"):
        config_of(CONFIG, [*TOY, "data.context=32"])
