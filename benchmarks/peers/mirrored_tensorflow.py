"""nanoGPT's model under TensorFlow's MirroredStrategy, over logical CPUs, in a process of its own.

Reads "steps" from each line of its input, takes as many and writes the milliseconds that one took.
Its first line of output names the version and the devices.
"""

import importlib
import json
import sys
import time

import numpy as np

tf = importlib.import_module("tensorflow")  # of another Python than this repository's, perhaps
layers = tf.keras.layers


class Block(layers.Layer):
    """Attention, then an MLP."""

    def __init__(self, width: int, heads: int):
        super().__init__()
        self.norm_1, self.norm_2 = layers.LayerNormalization(), layers.LayerNormalization()
        self.attention = layers.MultiHeadAttention(heads, width // heads)
        self.up, self.down = layers.Dense(4 * width), layers.Dense(width)

    def call(self, x):
        """b t d to b t d."""
        y = self.norm_1(x)
        x = x + self.attention(y, y, use_causal_mask=True)
        return x + self.down(tf.nn.gelu(self.up(self.norm_2(x)), approximate=True))


class Transformer(tf.keras.Model):
    """Tokens b t to logits b t v, the head tied to the embedding."""

    def __init__(self, vocab: int, context: int, layers: int, heads: int, width: int):
        super().__init__()
        self.tokens = tf.keras.layers.Embedding(vocab, width)
        self.positions = tf.keras.layers.Embedding(context, width)
        self.blocks = [Block(width, heads) for _ in range(layers)]
        self.norm = tf.keras.layers.LayerNormalization()

    def call(self, tokens):
        """Return the logits at every position."""
        x = self.tokens(tokens) + self.positions(tf.range(tf.shape(tokens)[1]))
        for block in self.blocks:
            x = block(x)
        return tf.matmul(self.norm(x), self.tokens.embeddings, transpose_b=True)


def main():
    """Serve steps until the input ends."""
    given = json.loads(sys.argv[1])
    sizes, batch, count = given["sizes"], given["batch"], given["devices"]
    cpu = tf.config.list_physical_devices("CPU")[0]
    one = tf.config.LogicalDeviceConfiguration()
    tf.config.set_logical_device_configuration(cpu, [one] * count)
    strategy = tf.distribute.MirroredStrategy([f"/cpu:{i}" for i in range(count)])
    tokens = np.random.default_rng(0).integers(
        0, sizes["vocab"], (16 * batch, sizes["context"] + 1), np.int32
    )
    data = tf.data.Dataset.from_tensor_slices(tokens).repeat().batch(batch, drop_remainder=True)
    rows = iter(strategy.experimental_distribute_dataset(data.prefetch(2)))
    with strategy.scope():
        model = Transformer(**sizes)
        model(tokens[:1, :-1])
        optimizer = tf.keras.optimizers.AdamW(1e-3, weight_decay=1e-4)
        optimizer.build(model.trainable_variables)

    def step(tokens):
        with tf.GradientTape() as tape:
            losses = tf.nn.sparse_softmax_cross_entropy_with_logits(
                tokens[:, 1:], model(tokens[:, :-1], training=True)
            )
            loss = tf.reduce_sum(losses) / (batch * sizes["context"])
        grads = tape.gradient(loss, model.trainable_variables)
        optimizer.apply_gradients(zip(grads, model.trainable_variables, strict=True))
        return loss

    @tf.function
    def train(tokens):
        each = strategy.run(step, args=(tokens,))
        return strategy.reduce(tf.distribute.ReduceOp.SUM, each, axis=None)

    train(next(rows))
    print(f"TensorFlow {tf.__version__}, {strategy.num_replicas_in_sync} devices", flush=True)
    for line in sys.stdin:
        start = time.perf_counter()
        losses = [train(next(rows)) for _ in range(int(line))]
        float(losses[-1])
        print((time.perf_counter() - start) / int(line) * 1e3, flush=True)


main()
