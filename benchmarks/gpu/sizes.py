"""Sizes of each part: those of a GPU with 80 GB, and toys for a rehearsal on a CPU."""

from typing import Any, NamedTuple

_RUN = ["checkpoint.every=0", "evaluate.every=0", "log.every=1", "parallel.devices=1"]


class Language(NamedTuple):
    """A language model, as words for `configs/gpt2.yaml` and as arguments of the PyTorch model."""

    rows: int
    context: int
    model: dict[str, Any]

    def words(self, *more: str) -> list[str]:
        """Return the values of the config."""
        values = {**self.model, "context": self.context, "preset": "none"}
        return [
            *_RUN,
            *(f"batch={self.rows}", "microbatches=1", f"evaluate.batch={self.rows}"),
            f"data={{kind: random, vocab: {self.model['vocab']}, context: {self.context}}}",
            *(f"model.{name}={value}" for name, value in values.items()),
            *more,
        ]


_GPT2 = {
    "vocab": 50304,
    "layers": 12,
    "heads": 12,
    "width": 768,
    "hidden": 3072,
    "kv_heads": 12,
    "norm": "layer",
    "activation": "gelu",
    "positions": "{kind: learned}",
    "bias": "false",
    "tied": "true",
}
_LLAMA = {
    **_GPT2,
    "vocab": 32000,
    "layers": 22,
    "heads": 32,
    "kv_heads": 4,
    "width": 2048,
    "hidden": 5632,
    "norm": "rms",
    "activation": "swiglu",
    "positions": "{kind: rotary}",
    "tied": "false",
}
_TOY = {"vocab": 256, "layers": 2, "heads": 2, "kv_heads": 2, "width": 32, "hidden": 64}

# TinyLlama's sizes, 1.1 billion parameters: Zhang et al. 2024, https://arxiv.org/abs/2401.02385.
LANGUAGE = {
    "full": {"gpt2": Language(32, 1024, _GPT2), "llama": Language(4, 2048, _LLAMA)},
    "rehearsal": {
        "gpt2": Language(2, 16, {**_GPT2, **_TOY}),
        "llama": Language(2, 16, {**_LLAMA, **_TOY, "kv_heads": 1}),
    },
}
IMAGES = {
    "full": {"resnet18": (128, (32, 32, 3), 64), "cnn": (128, (28, 28, 1), 32)},
    "rehearsal": {"resnet18": (4, (8, 8, 3), 8), "cnn": (4, (8, 8, 1), 4)},
}
"""Rows, image and channels of the first layer."""
LANGUAGE["quick"], IMAGES["quick"] = LANGUAGE["full"], IMAGES["full"]
TURNS = {"full": (10, 10), "quick": (6, 10), "rehearsal": (2, 1)}
"""Turns, and steps in each."""
ROUNDS = {"full": 3, "quick": 1, "rehearsal": 1}
"""Starts of each kind, and saves after the first."""
