"""LoRA beside full fine-tuning of SmolLM2-135M: memory by plan, time of a step, loss.

    python benchmarks/lora_smollm2.py FOLDER [--steps 150] [--every 50] [--rows 2] [--context 64]

FOLDER is the model as Hugging Face lays it out (config.json, model.safetensors, tokenizer.json,
chat_template.jinja). The task: a speech of a play of Shakespeare as the user's message and the next
speech as the answer, pairs that fit the context. All ways learn the same rows; their steps take
turns, so that other work on the machine meets them alike. Losses are nats a token of held-out
answers.
"""

import argparse
import itertools
import json
import re
import statistics
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
from pairs import machine, ratio

from jtrain.config.resolve import resolve
from jtrain.data.known_sets import read_plays
from jtrain.inspect.plan.plan import Plan, make_plan
from jtrain.inspect.plan.topology import find_topology, prepare_environment
from jtrain.io.formatting import format_bytes
from jtrain.train.experiment import RunConfig
from jtrain.train.program import set_up

CONFIG = Path(__file__).parents[1] / "configs" / "chat.yaml"
TERMS = "rank: 8, alpha: 16, on: ['blocks/*/kernel']"
WAYS = {  # settings; a rate for each, LoRA's ten times the other
    "in full": ("optimizer.lr=5e-5",),
    "LoRA": ("optimizer.lr=5e-4", f"lora={{{TERMS}}}"),
    "LoRA, int8": ("optimizer.lr=5e-4", f"lora={{{TERMS}, frozen: int8}}"),
    "LoRA, nf4": ("optimizer.lr=5e-4", f"lora={{{TERMS}, frozen: nf4}}"),
}
SYSTEM = {"role": "system", "content": "Answer as in a play of Shakespeare."}


def conversations(characters: int) -> Iterator[list[dict[str, str]]]:
    """Yield a conversation for each two speeches in a row with at most so many characters."""
    for play in read_plays().values():
        speeches = [re.sub(r"^[^\n]*:\n", "", part).strip() for part in play.split("\n\n")]
        for question, answer in itertools.pairwise(speeches):
            if question and answer and len(question) + len(answer) <= characters:
                roles = (("user", question), ("assistant", answer))
                yield [SYSTEM, *({"role": role, "content": text} for role, text in roles)]


class Contestant:
    """A way of training: its plan, its step, and its state."""

    def __init__(self, config: RunConfig):
        self.plan: Plan = make_plan(config, find_topology("cpu:1"))
        self.program = set_up(config)
        self.state: Any = self.program.initial_state()
        self._step = self.program.compile_step()
        self.seconds: list[float] = []
        self.losses: list[float] = []

    def take_step(self, step: int) -> None:
        """Take a step on the batch of that number, and note its seconds."""
        batch = self.program.place(self.program.batches().read(step))
        start = time.perf_counter()
        self.state, metrics = self._step(self.state, batch)
        jax.block_until_ready((self.state, metrics))
        self.seconds.append(time.perf_counter() - start)

    def evaluate(self) -> None:
        """Note the loss over the held-out rows."""
        self.losses.append(self.program.measure(self.state)["loss"])

    def bytes_of(self, name: str) -> int:
        """Return the bytes of a part of the state."""
        return sum(part.bytes for part in self.plan.parts if part.name == name)


def row(name: str, one: Contestant, other: Contestant) -> str:
    """Return a row of the table; `other` is the way that times are compared with."""
    parts = [format_bytes(one.bytes_of(part)) for part in ("parameters", "frozen", "optimizer")]
    warm = slice(2, None)
    cells = [
        *parts,
        format_bytes(one.plan.memory["temporaries"]),
        format_bytes(one.plan.peak),
        f"{statistics.median(one.seconds[warm]):.2f}",
        str(ratio(one.seconds[warm], other.seconds[warm])),
        *(f"{loss:.3f}" for loss in one.losses),
    ]
    return f"| {name} | {' | '.join(cells)} |"


def main() -> None:
    """Print a row for each way."""
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("--steps", type=int, default=150)
    parser.add_argument("--every", type=int, default=50, help="steps between evaluations")
    parser.add_argument("--rows", type=int, default=2)
    parser.add_argument("--context", type=int, default=64)
    parser.add_argument("--talks", type=int, default=2000)
    given = parser.parse_args()
    prepare_environment("cpu:1")
    with tempfile.TemporaryDirectory() as scratch:
        file = Path(scratch) / "talks.jsonl"
        talks = list(conversations(characters=2 * given.context))
        chosen = talks[:: max(1, len(talks) // given.talks)]
        file.write_text("\n".join(json.dumps({"messages": talk}) for talk in chosen))
        common = (
            f"steps={given.steps}",
            f"batch={given.rows}",
            "steps_per_call=1",
            f"data={{path: {file}, context: {given.context}, truncate: cut, validation: 0.05, "
            f"tokenizer: {given.folder}/tokenizer.json, "
            f"template: {given.folder}/chat_template.jinja}}",
            f"model={{from: {given.folder}, context: {given.context}, scan: true}}",
            f"optimizer.schedule.warmup={given.steps // 15}",
            "parallel={kind: single}",
        )
        ways = {
            name: Contestant(resolve(CONFIG, [*common, *own]).config) for name, own in WAYS.items()
        }
        for step in range(given.steps):
            for one in ways.values():
                if step % given.every == 0:
                    one.evaluate()
                one.take_step(step)
        for one in ways.values():
            one.evaluate()
    print(machine())
    counts = " | ".join(
        f"loss at {step}" for step in [*range(0, given.steps, given.every), given.steps]
    )
    columns = ("trained", "frozen", "optimizer", "temporary", "in all", "s a step", "of in full")
    print(f"\n| | {' | '.join(columns)} | {counts} |")
    for name, one in ways.items():
        print(row(name, one, ways["in full"]))


if __name__ == "__main__":
    main()
