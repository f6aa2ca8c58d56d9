"""A small CNN as flax's documentation would write it, and the two idioms of training it."""

from functools import partial

import jax
import jax.numpy as jnp
import optax
from flax import nnx


class CNN(nnx.Module):
    """Images b 28 28 1 to logits b 10."""

    def __init__(self, rngs: nnx.Rngs):
        self.conv1 = nnx.Conv(1, 32, kernel_size=(3, 3), rngs=rngs)
        self.conv2 = nnx.Conv(32, 64, kernel_size=(3, 3), rngs=rngs)
        self.linear = nnx.Linear(7 * 7 * 64, 10, rngs=rngs)
        self.max_pool = partial(nnx.max_pool, window_shape=(2, 2), strides=(2, 2))

    def __call__(self, x):
        """Return the logits."""
        x = self.max_pool(nnx.relu(self.conv1(x)))
        x = self.max_pool(nnx.relu(self.conv2(x)))
        return self.linear(x.reshape(x.shape[0], -1))


def _loss(model, image, label):
    return optax.softmax_cross_entropy_with_integer_labels(model(image), label).mean()


def dict_trainer(optimizer: optax.GradientTransformation):
    """Return a step of images and labels: `jax.jit` over pure dicts, donated."""
    graph, variables = nnx.split(CNN(nnx.Rngs(0)))
    params = nnx.to_pure_dict(variables)

    def loss(params, image, label):
        state = jax.tree.map(lambda leaf: leaf, variables)
        nnx.replace_by_pure_dict(state, params)
        return _loss(nnx.merge(graph, state), image, label)

    def step(params, opt_state, image, label):
        value, grads = jax.value_and_grad(loss)(params, image, label)
        updates, opt_state = optimizer.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, value

    compiled = jax.jit(step, donate_argnums=(0, 1))
    state = [jax.tree.map(jnp.copy, params), optimizer.init(params)]

    def take(image, label):
        *state[:], value = compiled(*state, image, label)
        return value

    return take


def module_trainer(optimizer: optax.GradientTransformation):
    """Return the same step by `nnx.jit`, `nnx.value_and_grad` and `nnx.Optimizer`."""
    model = CNN(nnx.Rngs(0))
    state = nnx.Optimizer(model, optimizer, wrt=nnx.Param)

    @nnx.jit
    def step(model, state, image, label):
        value, grads = nnx.value_and_grad(_loss)(model, image, label)
        state.update(model, grads)
        return value

    return lambda image, label: step(model, state, image, label)
