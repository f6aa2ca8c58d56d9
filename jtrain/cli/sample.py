"""`jtrain sample RUN`: a text in the hand of a checkpoint."""

import contextlib
import dataclasses
import json
from collections.abc import Sequence

from pydantic import Field

from jtrain.cli.arguments import Arguments
from jtrain.cli.find_run import asked_step, complain, config_of, said_apart, speaks
from jtrain.config.configclass import configclass
from jtrain.config.node import DEFAULT, TYPED, Node, SourceLocation, stop
from jtrain.config.resolve import check, resolve
from jtrain.train.experiment import Prompt

OPTIONS = ("tokens", "temperature", "top_k", "top_p", "seed")


def main(argv: Sequence[str]) -> int:
    """Prints the text; gives the exit code."""
    typed = _arguments().parse(argv)
    path = config_of(typed.run, "sample")
    resolved = resolve(path, typed.settings)
    prompt, seed = _asked({name: getattr(typed, name) for name in OPTIONS}, typed.prompt)

    from jtrain.train.restore_run import complete

    step = asked_step(typed.step, "sample")
    with said_apart():
        step, text = complete(
            resolved.config, path.parent, prompt, seed=seed, step=step, tell=complain
        )
    if not speaks():
        return 0
    if typed.json:
        print(json.dumps({"run": str(typed.run), "step": step, "text": text}))
    else:
        print(text)
    return 0


def _asked(options: dict[str, str | None], text: str) -> tuple[Prompt, int]:
    """The prompt and the seed, checked as a config is."""

    @configclass
    class Asked(Prompt):
        seed: int = Field(default=0, ge=0, lt=2**32)

    said = {"text": Node(text, DEFAULT)}
    for name, word in options.items():
        if word is not None:
            setting = f"--{name.replace('_', '-')}={word}"
            said[name] = Node(_number(word), SourceLocation(TYPED, setting=setting))
    asked, wrong = check(Asked, Node(said, DEFAULT))
    stop(wrong)
    assert asked is not None, "what has no mistake is there"
    given = {field.name: getattr(asked, field.name) for field in dataclasses.fields(Prompt)}
    return Prompt(**given), asked.seed


def _number(word: str) -> int | float | str:
    for kind in (int, float):
        with contextlib.suppress(ValueError):
            return kind(word)
    return word


def _arguments() -> Arguments:
    parser = Arguments(
        "sample",
        "Writes a text as a checkpoint of a run would: the prompt and what the model makes of it.",
        "runs/shakespeare",
        "shakespeare --prompt 'ROMEO:' --tokens 200 --temperature 0.7",
        "shakespeare --prompt 'ROMEO:' --top-k 20 --top-p 0.9 --seed 3 --json",
    )
    parser.add_argument("run", metavar="RUN", help="a directory with a run, or its name in runs/")
    words = "values to change: of parallel"
    parser.add_argument("settings", metavar="KEY=VALUE", nargs="*", help=words)
    parser.add_argument(
        "--prompt", default="", help="how it begins; default: as the experiment has it"
    )
    parser.add_argument("--tokens", help="how many are drawn (400)")
    parser.add_argument("--temperature", help="below 1 likelier ones, 0 the likeliest (0.8)")
    parser.add_argument("--top-k", help="draw from so many of the likeliest; 0 from all (0)")
    parser.add_argument("--top-p", help="draw from the likeliest that add up to this (1)")
    parser.add_argument("--seed", help="another one draws another text (0)")
    parser.add_argument("--step", default="newest", help="newest (default), best or a number")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    return parser
