"""GPT-2 over token files, experiments/language.py, at toy size."""

from pathlib import Path

import jax
import jax.numpy as jnp
import pytest
from comparison import assert_close
from quick_study import config_of

from jtrain.core.mean import Terms
from jtrain.core.placement import Unplaced
from jtrain.data.text.prepare import prepare
from jtrain.data.text.tokenizing import ByteTokens
from jtrain.losses.next_token import inputs_and_targets, next_token

pytestmark = pytest.mark.thorough

CONFIG = Path(__file__).parents[2] / "configs" / "gpt2.yaml"
TOY = (
    *("batch=8", "microbatches=2", "data.context=16", "data.validation=0.2", "model.context=16"),
    *("model.layers=1", "model.heads=2", "model.width=32", "model.vocab=0"),
    *("optimizer.schedule.warmup=2", "parallel={kind: single}"),
)


@pytest.fixture(autouse=True)
def _data(home: Path):
    (home / "text.txt").write_text("the cat sat on the mat and the rat sat on the cat. " * 40)
    prepare(home / "text.txt", home / "tokens", tokenizing=ByteTokens())


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


def test_experts_are_judged_besides_and_a_batch_of_them_meets():
    group = "batch"
    experts = f"model.experts={{kind: dropless, count: 4, uneven: 0.5, group: {group}}}"
    x = config_of(CONFIG, [*TOY, "microbatches=1", experts]).build(Unplaced())
    params, _ = x.init(jax.random.key(0))
    terms, metrics = jax.jit(x.loss)(params, x.train[0], None)
    assert isinstance(terms, Terms)
    assert_close(terms.coefficients, (1.0, 0.5, 1e-3), 1e-6)
    assert 0.9 < metrics["balance"].value() < 2  # 4 experts, of which 2 are chosen
    assert set(metrics) == {"accuracy", "cross_entropy", "balance", "router_z"}
    assert x.rows_interact == "batch"
