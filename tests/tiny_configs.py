"""What makes each file in configs/ small enough to train in a moment, and the data for them."""
# ruff: noqa: SIM905  (words read best as words)

import json
from pathlib import Path

from image_files import write_digits, write_fashion_mnist, write_image_folder

from jtrain.data.text.prepare import prepare
from jtrain.data.text.tokenizing import ByteTokens

WARMUP = "optimizer.schedule.warmup=2"
CHARACTERS = f"""batch=8 data.context=32 model.context=32 model.layers=1 model.width=32
    {WARMUP}""".split()
LLAMA = f"""data.context=16 data.vocab=64 data.rows=64 model.preset=none model.vocab=0
    model.context=16 model.layers=2 model.heads=2 model.width=32 model.attention=xla {WARMUP}
    evaluate.batch=8""".split()
ADDITIONS = f"""batch=8 data.questions=64 data.validation=16 model.layers=1 model.heads=2
    model.width=16 {WARMUP} evaluate.batch=8""".split()
MNIST1D = ["batch=16", "steps_per_call=1", "data.rows=100"]
# What makes a config small enough to train in a moment.
TINY = {
    "additions": ADDITIONS,
    "chat": [*CHARACTERS, "data.context=64", "model.context=64"],
    "digits": ["batch=8", "steps_per_call=1", "model.widths=[8]"],
    "embeddings": f"""batch=8 data.context=16 data.negatives=1 chunks=2 model.context=16
        model.layers=1 model.heads=2 model.width=16 {WARMUP} evaluate.batch=8""".split(),
    "fashion_mnist": ["batch=16", "model.channels=[4, 4]"],
    "gan": ["batch=16", "model.widths=[8]", "steps_per_call=1"],
    "gpt2": f"""batch=16 microbatches=2 data.context=16 data.validation=0.2 model.context=16
        model.layers=1 model.heads=2 model.width=32 model.vocab=0 {WARMUP}""".split(),
    "llama2_7b": LLAMA,
    "llama3_8b": LLAMA,
    "mixtral_8x7b": [*LLAMA,
        *("batch=16", "evaluate.batch=16", "model.experts={kind: dropless, count: 4}"),
        *("parallel.fsdp=4", "parallel.expert=2")],
    "image_folder": """batch=8 steps=20 data.height=16 data.width=16 model.blocks=[1] model.width=4
        workers.count=2""".split(),
    "grpo": [*ADDITIONS, "init_from={}", "policy.group=4"],
    "grpo_smollm2": [*ADDITIONS, *("init_from={}", "microbatches=1", "data.tokenizer=''"),
        *("model.preset=none", "model.vocab=0", "policy.group=4")],
    "heat": ["batch=8", "steps_per_call=1", "model.widths=[4]"],
    "lite0_fashion": """batch=16 data.rows=40 model.preset=none model.stem=8
        model.widths=[8,8,8,8,8,8,8] model.blocks=[1,1,1,1,1,1,1] model.features=8
        model.pixels.height=32 model.pixels.width=32 init_from.path=''""".split(),
    "mnist1d_cnn": MNIST1D,
    "mnist1d_gru": MNIST1D,
    "mnist1d_logistic": ["batch=80", *MNIST1D[1:]],
    "mnist1d_mlp": MNIST1D,
    "policy_gradient": ["batch=8", "data.horizon=12", "model.widths=[8]"],
    "resnet18_fashion": ["batch=16", "model.preset=none", "model.blocks=[1]", "model.width=4"],
    "shakespeare": CHARACTERS,
    "speedrun": [*CHARACTERS, "model.heads=4"],
    "tiny_shakespeare": [*CHARACTERS, "data.kind=shakespeare"],  # which lies in the package
    "tiny_shakespeare_tuned": [*CHARACTERS, "data.kind=shakespeare"],
    "two_towers": ["batch=8", "steps_per_call=1", "model.widths=[8]", "model.outputs=4"],
    "vae": ["batch=8", "steps_per_call=1", "model.widths=[8]", "model.latents=2"],
}  # fmt: skip


def write_sets(folder: Path) -> None:
    """Write digits, clothes and tokens, tiny, into a folder that JTRAIN_DATA names."""
    write_digits(folder / "digits", rows=100)
    write_fashion_mnist(folder / "fashion-mnist")
    write_image_folder(folder / "images", classes=4, each=12, side=16)
    (folder / "text").write_text("to be or not to be, that is the question. " * 20)
    write_conversations(folder / "chat.jsonl", 80)
    write_pairs(folder / "pairs.jsonl", 100)
    prepare(str(folder / "text"), folder / "tokens", tokenizing=ByteTokens())


def write_conversations(path: Path, count: int) -> Path:
    """Write JSON lines of conversations of one or two turns."""
    lines = []
    for i in range(count):
        turn = [
            {"role": "user", "content": f"{i}+{i}"},
            {"role": "assistant", "content": str(2 * i)},
        ]
        lines.append(json.dumps({"messages": turn * (1 + i % 2)}))
    path.write_text("\n".join(lines))
    return path


def write_pairs(path: Path, count: int) -> Path:
    """Write JSON lines of a number, the next one and two others."""
    rows = [
        {"anchor": f"{i}", "positive": f"after {i}", "negatives": [f"after {i + 1}", f"at {i}"]}
        for i in range(count)
    ]
    path.write_text("\n".join(map(json.dumps, rows)))
    return path
