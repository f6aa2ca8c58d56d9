"""A block of a transformer: attention, then an MLP or experts, each added to its input."""

import math

import jax
import jax.numpy as jnp

from jtrain.inspect.eject.pieces.layers import DROPOUT, drop, init_linear, linear
from jtrain.inspect.eject.pieces.norms import BIAS, init_norm, norm_last

LAYERS: int = 4
WIDTH: int = 128  # of a position between blocks
HEADS: int = 4
KV_HEADS: int = 4  # heads of keys and values
HEAD_SIZE: int = 32
HIDDEN: int = 512  # width of the MLPs
ACTIVATION: str = "gelu"
QKV_BIAS: bool = True
STD: float = 0.02  # of every kernel
STD_OUT: float = 0.02  # of the kernels before a sum over the layers
EXPERTS: int = 0  # of a block
ROTARY: bool = False
CAUSAL: bool = True


def init_block(draws):
    """Return the parameters of a block."""
    columns, inner = (HEADS + 2 * KV_HEADS) * HEAD_SIZE, HEADS * HEAD_SIZE
    block = {
        "norm_attention": init_norm(WIDTH),
        "qkv": init_linear(draws, WIDTH, columns, STD, bias=QKV_BIAS),
        "out": init_linear(draws, inner, WIDTH, STD_OUT, bias=BIAS),
        "norm_mlp": init_norm(WIDTH),
    }
    if EXPERTS > 0:
        return {**block, "mixture": init_experts(draws)}
    else:
        if ACTIVATION == "swiglu" or ACTIVATION == "geglu":
            block["gate"] = init_linear(draws, WIDTH, HIDDEN, STD, bias=BIAS)
        block["up"] = init_linear(draws, WIDTH, HIDDEN, STD, bias=BIAS)
        return {**block, "down": init_linear(draws, HIDDEN, WIDTH, STD_OUT, bias=BIAS)}


def apply_block(block, x, angles, keys, index):
    """Return `x` after block number `index`, and the logits of its router, if it has one."""
    y = attention(block, norm_last(block["norm_attention"], x), angles)
    if DROPOUT > 0:
        y = drop(y, keys, 2 * index + 1)
    x = x + y
    y = norm_last(block["norm_mlp"], x)
    if EXPERTS > 0:
        y, routed = mixture(block["mixture"], y)
    else:
        y, routed = mlp(block, y), None
    if DROPOUT > 0:
        y = drop(y, keys, 2 * index + 2)
    return x + y, routed


def attention(block, x, angles):
    """Return the attention of each position, b t d."""
    shared = HEADS // KV_HEADS  # heads of queries that share a key and a value
    qkv = linear(block["qkv"], x).reshape(*x.shape[:2], KV_HEADS, shared + 2, -1)
    q, k, v = jnp.split(qkv, (shared, shared + 1), axis=3)
    q, k, v = q.reshape(*x.shape[:2], HEADS, -1), k.squeeze(3), v.squeeze(3)
    if ROTARY:
        q, k = rotate(q, angles), rotate(k, angles)
    return linear(block["out"], attend(q, k, v).reshape(*x.shape[:2], -1))


def attend(q, k, v):
    """Return softmax(q k / root of the head size) v, b t h k."""
    q, k, v = (jnp.moveaxis(x, 2, 1) for x in (q, k, v))  # b h t k
    shape = q.shape
    if HEADS != KV_HEADS:  # the heads of a group are more rows of one product
        q = q.reshape(shape[0], KV_HEADS, -1, shape[-1])
    scores = jnp.einsum("bhtk,bhsk->bhts", q, k).astype(jnp.float32) * (1 / math.sqrt(HEAD_SIZE))
    time = k.shape[2]
    visible = jnp.tri(time, time, dtype=bool) if CAUSAL else jnp.ones((time, time), bool)
    hidden = jnp.where(visible, 0, -1e30).astype(scores.dtype)[None, None]
    if HEADS != KV_HEADS:
        hidden = jnp.tile(hidden, (1, 1, HEADS // KV_HEADS, 1))
    chances = jax.nn.softmax(scores + hidden, axis=-1).astype(v.dtype)
    return jnp.moveaxis(jnp.einsum("bhts,bhsk->bhtk", chances, v).reshape(shape), 1, 2)


def rotate(x, angles):
    """Rotate numbers i and i + k/2 of each head as a pair, by the angles of its position."""
    cos, sin = (part[None, :, None] for part in angles)
    first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    rotated = (first * cos - second * sin, second * cos + first * sin)
    return jnp.concatenate(rotated, axis=-1).astype(x.dtype)


def mlp(block, x):
    """Apply a wide layer with its activation."""
    wide = linear(block["up"], x)
    if ACTIVATION == "swiglu":
        gate = linear(block["gate"], x)
        wide = swiglu(wide, gate)
    elif ACTIVATION == "geglu":
        wide = gelu(linear(block["gate"], x)) * wide
    elif ACTIVATION == "gelu_exact":
        wide = jax.nn.gelu(wide.astype(jnp.float32), approximate=False).astype(wide.dtype)
    else:
        wide = gelu(wide)
    return linear(block["down"], wide)


def swiglu(wide, gate):
    """Return `wide` times SiLU of `gate` (Shazeer 2020), in float32."""
    return (jax.nn.silu(gate.astype(jnp.float32)) * wide.astype(jnp.float32)).astype(wide.dtype)


SLOPE, CUBE = math.sqrt(2 / math.pi), 0.044715


@jax.custom_vjp
def gelu(x):
    """Return GELU by tanh, as in GPT-2. Forward and backward pass are written so that they share no
    expression, and the compiler saves no array between them."""
    wide = x.astype(jnp.float32)
    return (wide * jax.nn.sigmoid(2 * SLOPE * (wide + CUBE * wide**3))).astype(x.dtype)


def gelu_forward(x):
    """Save the input."""
    return gelu(x), x


def gelu_backward(x, grad):
    """Return the gradient in `x`."""
    wide = x.astype(jnp.float32)
    square = jnp.square(wide)
    tanh = 1 - 2 / (1 + jnp.exp(2 * SLOPE * wide * (1 + CUBE * square)))
    inner = SLOPE * (1 + 3 * CUBE * square)
    slope = 0.5 * (1 + tanh) + 0.5 * wide * (1 - jnp.square(tanh)) * inner
    return ((grad.astype(jnp.float32) * slope).astype(x.dtype),)


gelu.defvjp(gelu_forward, gelu_backward)


TOP_K: int = 2  # experts that a token goes through
CHOSEN: bool = True  # whether weights are of the chosen experts alone


def init_experts(draws):
    """Return the router and the experts' MLPs."""
    params = {"router": draws.normal((WIDTH, EXPERTS), STD)}
    if ACTIVATION == "swiglu" or ACTIVATION == "geglu":
        params["gate"] = draws.normal((EXPERTS, WIDTH, HIDDEN), STD)
    params["up"] = draws.normal((EXPERTS, WIDTH, HIDDEN), STD)
    return {**params, "down": draws.normal((EXPERTS, HIDDEN, WIDTH), STD_OUT)}


def mixture(layer, x):
    """Return the weighted sum of each token's experts, and the logits of the router."""
    wide, router = x.astype(jnp.float32), layer["router"].astype(jnp.float32)
    logits = jnp.matmul(wide, router, precision="highest")
    order = jnp.argsort(jax.lax.stop_gradient(logits), stable=True, descending=True)
    chosen = order[..., :TOP_K]
    one_hot = jax.nn.one_hot(chosen, EXPERTS, dtype=bool)  # b t k e
    highest = jnp.where(one_hot, logits[..., None, :], 0).sum(-1)
    if CHOSEN:
        weights = jax.nn.softmax(highest, -1)
    else:
        weights = jnp.exp(highest - jax.nn.logsumexp(logits, -1, keepdims=True))
    return apply_experts(layer, x, chosen, weights), logits


def apply_experts(layer, x, chosen, weights):
    """Apply each expert to its tokens, which are sorted by expert; none is dropped."""
    tokens, flat = x.reshape(-1, x.shape[-1]), chosen.reshape(-1)
    order = jnp.argsort(flat, stable=True)  # the choices, by expert
    slots = jnp.argsort(order).reshape(-1, TOP_K)  # of the choices of each token
    before = flat[:, None] < jnp.arange(EXPERTS + 1, dtype=flat.dtype)[None]
    sizes = jnp.diff(before.sum(0, dtype=jnp.int32))
    product = lambda rows, kernel: jax.lax.ragged_dot(rows, kernel, sizes)
    rows = to_slots(tokens, slots, order)
    wide = product(rows, layer["up"])
    if ACTIVATION == "swiglu":
        wide = swiglu(wide, product(rows, layer["gate"]))
    elif ACTIVATION == "geglu":
        wide = gelu(product(rows, layer["gate"])) * wide
    else:
        wide = gelu(wide)
    mixed = product(wide, layer["down"])[slots].reshape(*chosen.shape, -1)
    return (mixed.astype(jnp.float32) * weights[..., None]).sum(-2).astype(mixed.dtype)


@jax.custom_vjp
def to_slots(x, slots, order):
    """Return the token in each slot; the gradients of a token's choices are gathered and added."""
    return x[order // slots.shape[1]]


to_slots.defvjp(
    lambda x, slots, order: (to_slots(x, slots, order), slots),
    lambda slots, grad: (grad[slots].sum(1), None, None),
)
