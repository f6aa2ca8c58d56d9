"""Is our character transformer nanoGPT's? Both from nanoGPT's parameters, on the same batches.

    git clone https://github.com/karpathy/nanoGPT
    pip install torch
    python benchmarks/against_nanogpt.py nanoGPT --steps 2000

Needs tiny Shakespeare where configs/tiny_shakespeare.yaml finds it. Prints the losses of both along
the way, and what each comes to over the whole validation part. The rate is that of a run of 2,000
steps; ours falls to its end one step earlier than theirs, at the last.
"""

import argparse
import importlib
import importlib.util
import math
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from jtrain.config.resolve import resolve
from jtrain.core.state import new_state
from jtrain.core.step import make_step
from jtrain.losses.next_token import next_token

torch = importlib.import_module("torch")  # not among our own
LAYERS, HEADS, WIDTH, CONTEXT, ROWS, RUN = 4, 4, 128, 64, 12, 2000


def nanogpt(folder: Path, vocab: int):
    """nanoGPT's model in its setting for a CPU, and its AdamW."""
    found = importlib.util.spec_from_file_location("nanogpt", folder / "model.py")
    assert found is not None
    assert found.loader is not None
    module = importlib.util.module_from_spec(found)
    found.loader.exec_module(module)
    torch.manual_seed(1337)
    model = module.GPT(
        module.GPTConfig(
            block_size=CONTEXT,
            vocab_size=vocab,
            n_layer=LAYERS,
            n_head=HEADS,
            n_embd=WIDTH,
            dropout=0.0,
            bias=False,
        )
    )
    return model, model.configure_optimizers(0.1, 1e-3, (0.9, 0.99), "cpu")


def rate(step: int) -> float:
    """nanoGPT's learning rate."""
    if step < 100:
        return 1e-3 * (step + 1) / 101
    return 1e-4 + 0.5 * (1 + math.cos(math.pi * (step - 100) / (RUN - 100))) * 9e-4


def theirs(model, optimizer, batches: np.ndarray, whole: np.ndarray) -> tuple[np.ndarray, float]:
    """Return the loss of each step, and that of all of `whole` at the end."""
    loss = lambda rows: model(rows[:, :-1].contiguous(), rows[:, 1:].contiguous())[1]
    losses = []
    for step, rows in enumerate(torch.tensor(batches, dtype=torch.long)):
        for group in optimizer.param_groups:
            group["lr"] = rate(step)
        value = loss(rows)
        optimizer.zero_grad()
        value.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        losses.append(value.item())
    with torch.no_grad():
        parts = torch.tensor(whole, dtype=torch.long).split(256)
        end = sum(loss(part).item() * len(part) for part in parts) / len(whole)
    return np.array(losses), end


def parameters(model) -> dict:
    """Convert the parameters of a nanoGPT model to those of our transformer."""
    at = {name: array.detach().numpy() for name, array in model.state_dict().items()}

    def qkv(kernel):  # by head: its queries, keys and values
        parts = [part.reshape(WIDTH, HEADS, -1) for part in np.split(kernel.T, 3, 1)]
        return np.stack(parts, 2).reshape(WIDTH, -1)

    def block(number):
        of = lambda name: at[f"transformer.h.{number}.{name}.weight"]
        return {
            "norm_attention": {"scale": of("ln_1")},
            "qkv": {"kernel": qkv(of("attn.c_attn"))},
            "out": {"kernel": of("attn.c_proj").T},
            "norm_mlp": {"scale": of("ln_2")},
            "up": {"kernel": of("mlp.c_fc").T},
            "down": {"kernel": of("mlp.c_proj")},
        }

    return {
        "tokens": at["transformer.wte.weight"],
        "positions": at["transformer.wpe.weight"],
        "blocks": {str(number): block(number) for number in range(LAYERS)},
        "norm": {"scale": at["transformer.ln_f.weight"]},
    }


def ours(config, params, batches: np.ndarray, whole: np.ndarray) -> tuple[np.ndarray, float]:
    """Return the same losses for the step of the config."""
    vocab = len(params["tokens"])
    network = config.model.for_tokens(vocab).build()

    def loss(params, batch, rng):
        tokens = batch["tokens"]
        logits, _ = network.apply(params, {}, tokens[:, :-1], train=rng is not None)
        return next_token(logits, tokens[:, 1:], jnp.ones(tokens[:, 1:].shape, bool))

    optimizer = config.optimizer.build(RUN)
    state = new_state(jax.tree.map(jnp.asarray, params), optimizer, jax.random.key(0))
    step, losses = jax.jit(make_step(loss, optimizer), donate_argnums=0), []
    known = {"row": np.arange(ROWS, dtype=np.int32), "mask": np.ones(ROWS, bool)}
    for tokens in batches:
        state, metrics = step(state, {"tokens": tokens, **known})
        losses.append(metrics["loss"].value())
    judge = jax.jit(lambda tokens: loss(state.params, {"tokens": tokens}, None)[0])
    parts = [judge(whole[at : at + 256]) for at in range(0, len(whole), 256)]
    end = sum(float(part.total) for part in parts) / sum(float(part.weight) for part in parts)
    return np.array(losses), end


def main() -> None:
    """Train both and print the differences."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("nanogpt", type=Path)
    parser.add_argument("--steps", type=int, default=RUN)
    typed = parser.parse_args()
    config = resolve(Path(__file__).parents[1] / "configs" / "tiny_shakespeare.yaml").config
    corpus = config.data.build()
    draw = np.random.default_rng(0).integers(0, len(corpus.train), (typed.steps, ROWS))
    batches = np.stack([corpus.train[rows]["tokens"] for rows in draw]).astype(np.int32)
    whole = corpus.validation[np.arange(len(corpus.validation) - 1)]["tokens"].astype(np.int32)
    model, optimizer = nanogpt(typed.nanogpt, len(corpus.vocabulary))
    begin = jax.tree.map(np.copy, parameters(model))
    want, end = theirs(model, optimizer, batches, whole)
    got, our_end = ours(config, begin, batches, whole)
    print(f"{'step':>6} {'nanoGPT':>10} {'jtrain':>10} {'apart':>8}")
    for step in [s for s in (0, 10, 100, 300, 1000, typed.steps - 1) if s < typed.steps]:
        apart = abs(got[step] / want[step] - 1)
        print(f"{step:6} {want[step]:10.6f} {got[step]:10.6f} {apart:8.1e}")
    print(
        f"{'whole':>6} {end:10.4f} {our_end:10.4f}   validation, {whole[:, 1:].size:,} characters"
    )


if __name__ == "__main__":
    main()
