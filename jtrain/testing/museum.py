"""The wrong-gradient museum: public defects of trainers, each as a formula of our own.

A rule gets the sums of each microbatch on its device, and `psum`, the sum over the devices. The
threads were read in September 2026; no line of code is theirs.
"""

import jax
import jax.numpy as jnp
import optax

from jtrain.core.mean import Mean
from jtrain.core.placement import Placement, Unplaced
from jtrain.errors import UserError
from jtrain.errors.spelling import did_you_mean
from jtrain.parallel import Axes
from jtrain.testing.case import place_loss
from jtrain.testing.exhibit import Exhibit, add, answered, counted, hidden, nats, over


def soup_932(parts, psum):
    """Divide each microbatch by its own tokens, and average over microbatches and devices."""
    means = [over(sums, jnp.maximum(tokens, 1)) for sums, tokens in parts]
    return over(psum(add(means)), len(parts) * psum(1.0))


def nanochat_590(parts, psum):
    """Divide each microbatch by its own tokens, which is 0/0 where all targets are masked."""
    means = [over(sums, tokens) for sums, tokens in parts]
    return over(psum(add(means)), len(parts) * psum(1.0))


def torchtitan_2972(parts, psum):
    """Go backward from the sum, within the pipeline; divide only the loss that is reported."""
    (loss, gradient), tokens = psum(add(parts))
    return loss / tokens, gradient


def torchtitan_2318(parts, psum):
    """Divide by the tokens of all devices, and then average the gradients over the devices."""
    sums, tokens = add(parts)
    loss, gradient = over(sums, psum(tokens))
    return psum(loss), over(psum(gradient), psum(1.0))


def trl_6478(parts, psum):
    """Count the tokens of the whole step again for each microbatch, and divide by that count."""
    sums, tokens = psum(add(parts))
    return over(sums, sum(tokens for _ in parts))


def tunix_1833(parts, psum):
    """Divide by the sum of all weights, but by no less than 1."""
    sums, weight = psum(add(parts))
    return over(sums, jnp.maximum(weight, 1))


def lightning_21808(parts, psum):
    """Update after each batch, since each is the last of an epoch shorter than the accumulation."""
    means = [over(psum(sums), psum(tokens)) for sums, tokens in parts]
    loss, _ = over(add(means), len(parts))
    return loss, [over(gradient, len(parts)) for _, gradient in means]


def torchtitan_4167(parts, psum):
    """Report the average of the batches' own means; a batch of one token weighs like any other."""
    (_, gradient), tokens = psum(add(parts))
    losses = [psum(loss) / psum(own) for (loss, _), own in parts]
    return sum(losses) / len(losses), over(gradient, tokens)


def trl_6380(parts, psum):
    """Report the average over the devices of their own means over tokens."""
    (loss, gradient), tokens = add(parts)
    return psum(loss / tokens) / psum(1.0), over(psum(gradient), psum(tokens))


def torchtitan_4174(params, batch, rng):
    """Drop answers from the sum that is divided, and count their tokens all the same."""
    values = nats(hidden(params, batch) @ params["head"], batch["label"])
    total = jnp.where(counted(batch), values, 0).sum()
    return Mean(total, answered(batch).sum(dtype=jnp.float32))


def torchtitan_4054(place: Placement):
    """Split the head's columns over two devices, and keep one device's gradient of its input."""
    devices = 1 if isinstance(place, Unplaced) else 2

    def loss(params, batch, rng):
        x, columns = hidden(params, batch), jnp.split(params["head"], devices, 1)
        inputs = [x, *[jax.lax.stop_gradient(x)] * (devices - 1)]  # the sum of gradients is lost
        logits = [x @ part for x, part in zip(inputs, columns, strict=True)]
        return Mean.of(nats(jnp.concatenate(logits, 2), batch["label"]), counted(batch))

    return loss


def maxtext_4959(params, batch, rng):
    """Multiply the head's gradient by the cotangent, and not that of the activations below it."""

    def total(x, head, label, mask):
        return jnp.where(mask, nats(x @ head, label), 0).sum()

    def backward(saved, cotangent):
        below, head = jax.grad(total, (0, 1))(*saved)
        return below, cotangent * head, None, None

    tiled = jax.custom_vjp(total)
    tiled.defvjp(lambda *args: (total(*args), args), backward)
    sum_ = tiled(hidden(params, batch), params["head"], batch["label"], counted(batch))
    return Mean(sum_, counted(batch).sum(dtype=jnp.float32))


GITHUB = "https://github.com"
EXHIBITS = (
    Exhibit(
        name="soup-932",
        what="microbatches of few tokens count as much as those of many",
        thread=f"{GITHUB}/MakazhanAlpamys/Soup/issues/932",
        status="fixed September 2026, #943",
        cause="mean of means",
        rule=soup_932,
    ),
    Exhibit(
        name="nanochat-590",
        what="a microbatch whose targets are all masked makes every gradient NaN",
        thread=f"{GITHUB}/karpathy/nanochat/issues/590",
        status="open since 5 March 2026",
        cause="empty slice",
        rule=nanochat_590,
        lengths=(4, 0, 3, 0, 2, 0, 1, 0),
    ),
    Exhibit(
        name="torchtitan-2972",
        what="the gradient of a pipeline is as many times too large as the step has tokens",
        thread=f"{GITHUB}/pytorch/torchtitan/issues/2972",
        status="open since 15 April 2026; its copy in Forge fixed in August, #4194",
        cause="sum as a mean",
        rule=torchtitan_2972,
    ),
    Exhibit(
        name="torchtitan-2318",
        what="the gradient of DDP and HSDP is divided by the devices once more",
        thread=f"{GITHUB}/pytorch/torchtitan/issues/2318",
        status="open since 3 February 2026",
        cause="divided twice",
        rule=torchtitan_2318,
    ),
    Exhibit(
        name="trl-6478",
        what="tokens are counted once for each microbatch; the gradient is as many times too small",
        thread=f"{GITHUB}/huggingface/trl/pull/6478",
        status="fixed 21 July 2026",
        cause="divided twice",
        rule=trl_6478,
    ),
    Exhibit(
        name="tunix-1833",
        what="weights that add up to less than 1 make the gradient too small",
        thread=f"{GITHUB}/google/tunix/pull/1833",
        status="fixed 5 August 2026, 63d07632",
        cause="clamped weight",
        rule=tunix_1833,
        weight=1 / 32,
    ),
    Exhibit(
        name="lightning-21808",
        what="an epoch shorter than the accumulation updates after every batch",
        thread=f"{GITHUB}/Lightning-AI/pytorch-lightning/issues/21808",
        status="by design; warns since July 2026, #21811",
        cause="optimizer per part",
        rule=lightning_21808,
        error_of="update",
        optimizer=optax.adam(1e-2),
    ),
    Exhibit(
        name="torchtitan-4167",
        what="the validation loss averages the means of batches: 6.0 in place of 9.2",
        thread=f"{GITHUB}/pytorch/torchtitan/pull/4167",
        status="fixed 18 August 2026",
        cause="mean of means",
        rule=torchtitan_4167,
        error_of="loss",
    ),
    Exhibit(
        name="trl-6380",
        what="metrics over tokens average the means of devices",
        thread=f"{GITHUB}/huggingface/trl/pull/6380",
        status="fixed 20 July 2026",
        cause="mean of means",
        rule=trl_6380,
        error_of="loss",
    ),
    Exhibit(
        name="torchtitan-4174",
        what="tokens that DAPO drops stay in the denominator",
        thread=f"{GITHUB}/pytorch/torchtitan/pull/4174",
        status="fixed 19 August 2026",
        cause="hidden rows",
        loss=torchtitan_4174,
    ),
    Exhibit(
        name="torchtitan-4054",
        what="below tensor-parallel experts each device keeps its own share of the gradient",
        thread=f"{GITHUB}/pytorch/torchtitan/pull/4054",
        status="fixed 5 August 2026",
        cause="missing sum",
        loss=place_loss(torchtitan_4054),
        devices=Axes(devices=2, tensor=2, fsdp=1),
    ),
    Exhibit(
        name="maxtext-4959",
        what="with a tiled vocabulary all layers below the head get a gradient that is not divided",
        thread=f"{GITHUB}/AI-Hypercomputer/maxtext/pull/4959",
        status="fixed 20 August 2026, d60bb24e",
        cause="custom derivative",
        loss=maxtext_4959,
    ),
)


def find_exhibit(name: str) -> Exhibit:
    """Return the exhibit of a name.

    Raises:
        UserError: with the nearest name, or all names.
    """
    exhibits = {exhibit.name: exhibit for exhibit in EXHIBITS}
    if name not in exhibits:
        raise UserError(
            f"jtrain museum: {name} is no exhibit; the exhibits are "
            f"{', '.join(exhibits)}{did_you_mean(name, exhibits)}"
        )
    return exhibits[name]
