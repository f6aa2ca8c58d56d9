"""Image classifiers: a step of ours beside PyTorch's, on random images."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from sizes import IMAGES
from turns import TorchPeer, clocked, compare

from jtrain.core.loss import stateful
from jtrain.core.state import new_state
from jtrain.core.step import make_step
from jtrain.losses.cross_entropy import cross_entropy
from jtrain.models.classifiers import CNN, ResNet

CLASSES = 10


def images(kind: str, sizes: str, torch: str) -> dict[str, Any]:
    """Return images a second of both; momentum SGD for the ResNet, Adam for the CNN."""
    rows, image, width = IMAGES[sizes][kind]
    setting = {"model": kind, "batch": rows, "image": image, "width": width, "classes": CLASSES}
    peer = TorchPeer(torch, setting)
    return compare(
        clocked(trainer(kind, rows, image, width)),
        sizes,
        peer,
        work=rows,
        unit="images",
        flops=0.0,
    )


def trainer(kind: str, rows: int, image: tuple[int, int, int], width: int) -> Any:
    """Return a function of a number that takes a step on one batch, in bfloat16."""
    if kind == "cnn":
        config: Any = CNN(image=image, classes=CLASSES, channels=(width, 2 * width))
        optimizer = optax.adam(1e-3)
    else:
        config = ResNet(image=image, classes=CLASSES, width=width, stem="cifar")
        optimizer = optax.chain(optax.add_decayed_weights(1e-4), optax.sgd(0.1, 0.9))
    model = config.build()

    def loss(params: Any, extra: Any, batch: Any, rng: Any) -> Any:
        logits, extra = model.apply(params, extra, batch["image"], mask=batch["mask"], train=True)
        value = cross_entropy(logits, batch["label"], batch["mask"])
        value, metrics = value if isinstance(value, tuple) else (value, {})
        return value, metrics, extra

    def init(key: Any) -> Any:
        params, extra = model.init(key)
        return new_state(params, optimizer, key, extra)

    state = [jax.jit(init)(jax.random.key(0))]
    made = make_step(
        stateful(loss), optimizer, rows_interact=config.rows_interact, compute=jnp.bfloat16
    )
    step = jax.jit(made, donate_argnums=0)
    draw = np.random.default_rng(0)
    batch = jax.device_put(
        {
            "image": draw.normal(size=(rows, *image)).astype(jnp.bfloat16),
            "label": draw.integers(0, CLASSES, rows).astype(np.int32),
            "row": np.arange(rows, dtype=np.int32),
            "mask": np.ones(rows, bool),
        }
    )

    def take(number: int) -> Any:
        del number
        state[0], metrics = step(state[0], batch)
        return metrics["loss"].total

    return take
