"""The loss of answers under every split, and what means of means would give."""

import functools
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from comparison import assert_close, distance
from layouts import step_under
from tiny_configs import TINY, write_conversations

from jtrain.config.resolve import resolve
from jtrain.core.placement import Unplaced
from jtrain.parallel import Mirrored

ROOT = Path(__file__).parents[2]
SPLITS = [(4, 2), (1, 4), (2, 1)]
COUNTS = [0, 0, 1, 2, 20, 24, 5, 9]  # answer tokens to keep of each row


@pytest.fixture(scope="module")
def chat(tmp_path_factory):
    """Return the loss, its parameters and a batch, of which two rows have no answer."""
    folder = tmp_path_factory.mktemp("chat")
    path = write_conversations(folder / "chat.jsonl", 40)
    settings = [*TINY["chat"], f"data.path={path}", "model.heads=2", "model.width=16"]
    x = resolve(ROOT / "configs" / "chat.yaml", settings).config.build(Unplaced())
    batch = dict(x.train[0])
    seen = np.cumsum(batch["answer"], axis=1) <= np.array(COUNTS)[:, None]
    batch["answer"] = batch["answer"] & seen
    params, _ = jax.jit(x.init)(jax.random.key(0))
    params = jax.device_get(jax.tree.map(lambda leaf: 3 * leaf, params))  # steps donate copies
    return x.loss, params, batch


@functools.cache
def gradient_of_rows(loss):
    def mean(params, batch):
        value, _ = loss(params, batch, None)
        return value.total / jnp.maximum(value.weight, 1)

    return jax.jit(jax.value_and_grad(mean))


def mean_of_means(chat, groups: int):
    """Return the loss and the gradient as a mean over groups of the mean over their tokens."""
    loss, params, batch = chat
    call, size = gradient_of_rows(loss), len(COUNTS) // groups
    parts = [{n: a[i * size : (i + 1) * size] for n, a in batch.items()} for i in range(groups)]
    found = [call(params, {n: jnp.asarray(a) for n, a in part.items()}) for part in parts]
    return jax.tree.map(lambda *leaves: sum(leaves) / groups, *found)


@pytest.mark.thorough
@pytest.mark.parametrize(("devices", "microbatches"), SPLITS)
def test_loss_and_gradient_are_those_of_the_whole_batch(chat, devices, microbatches):
    want, gradient = mean_of_means(chat, 1)
    how = {"microbatches": microbatches, "ragged": True}
    loss, found = step_under(Mirrored(devices=devices), *chat, **how)
    assert_close(loss, want, 1e-6)
    assert distance(found, gradient) <= 1e-6


def table(chat) -> str:
    """Return the rows of docs/finetuning.md."""
    want, gradient = mean_of_means(chat, 1)
    lines = []
    for groups in (1, 2, 4, 8):
        value, found = mean_of_means(chat, groups)
        apart = distance(found, gradient) if groups > 1 else 0
        lines.append(f"| {groups} | {100 * (value / want - 1):+.1f} % | {100 * apart:.0f} % |")
    return "\n".join(lines)


@pytest.mark.thorough
def test_means_of_means_are_of_another_loss_as_the_page_says(chat):
    for groups in (2, 4, 8):
        assert distance(mean_of_means(chat, groups)[1], mean_of_means(chat, 1)[1]) > 0.05
    assert table(chat) in (ROOT / "docs" / "finetuning.md").read_text()
