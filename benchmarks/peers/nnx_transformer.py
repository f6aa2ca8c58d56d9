"""nanoGPT's model as flax's documentation would write it, and the two idioms of training it."""

import jax
import jax.numpy as jnp
import optax
from flax import nnx


class Block(nnx.Module):
    """Attention, then an MLP."""

    def __init__(self, width: int, heads: int, rngs: nnx.Rngs):
        self.heads = heads
        self.norm_1 = nnx.LayerNorm(width, rngs=rngs)
        self.qkv = nnx.Linear(width, 3 * width, rngs=rngs)
        self.out = nnx.Linear(width, width, rngs=rngs)
        self.norm_2 = nnx.LayerNorm(width, rngs=rngs)
        self.up = nnx.Linear(width, 4 * width, rngs=rngs)
        self.down = nnx.Linear(4 * width, width, rngs=rngs)

    def __call__(self, x):
        """b t d to b t d."""
        b, t, d = x.shape
        parts = jnp.split(self.qkv(self.norm_1(x)), 3, axis=-1)
        q, k, v = (part.reshape(b, t, self.heads, d // self.heads) for part in parts)
        x = x + self.out(jax.nn.dot_product_attention(q, k, v, is_causal=True).reshape(b, t, d))
        return x + self.down(nnx.gelu(self.up(self.norm_2(x))))


class Transformer(nnx.Module):
    """Tokens b t to logits b t v, the head tied to the embedding."""

    def __init__(self, vocab: int, context: int, layers: int, heads: int, width: int, rngs):
        self.tokens = nnx.Embed(vocab, width, rngs=rngs)
        self.positions = nnx.Embed(context, width, rngs=rngs)
        self.blocks = nnx.List([Block(width, heads, rngs) for _ in range(layers)])
        self.norm = nnx.LayerNorm(width, rngs=rngs)

    def __call__(self, tokens):
        """Return the logits at every position."""
        x = self.tokens(tokens) + self.positions(jnp.arange(tokens.shape[1]))[None]
        for block in self.blocks:
            x = block(x)
        return self.tokens.attend(self.norm(x))


def _loss(model, tokens):
    logits, targets = model(tokens[:, :-1]), tokens[:, 1:]
    return optax.softmax_cross_entropy_with_integer_labels(logits, targets).mean()


def dict_trainer(sizes: dict[str, int], optimizer: optax.GradientTransformation):
    """Return a function of tokens that takes a step: `jax.jit` over pure dicts, donated."""
    model = Transformer(**sizes, rngs=nnx.Rngs(0))
    graph, variables = nnx.split(model)
    params = nnx.to_pure_dict(variables)

    def loss(params, tokens):
        state = jax.tree.map(lambda leaf: leaf, variables)
        nnx.replace_by_pure_dict(state, params)
        return _loss(nnx.merge(graph, state), tokens)

    def step(params, opt_state, tokens):
        value, grads = jax.value_and_grad(loss)(params, tokens)
        updates, opt_state = optimizer.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, value

    compiled = jax.jit(step, donate_argnums=(0, 1))
    state = [jax.tree.map(jnp.copy, params), optimizer.init(params)]

    def take(tokens):
        *state[:], value = compiled(*state, tokens)
        return value

    return take


def module_trainer(sizes: dict[str, int], optimizer: optax.GradientTransformation):
    """Return the same step by `nnx.jit`, `nnx.value_and_grad` and `nnx.Optimizer`."""
    model = Transformer(**sizes, rngs=nnx.Rngs(0))
    state = nnx.Optimizer(model, optimizer, wrt=nnx.Param)

    @nnx.jit
    def step(model, state, tokens):
        value, grads = nnx.value_and_grad(_loss)(model, tokens)
        state.update(model, grads)
        return value

    return lambda tokens: step(model, state, tokens)
