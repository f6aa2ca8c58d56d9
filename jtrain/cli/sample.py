"""`jtrain sample RUN`: a text sampled from a checkpoint."""

import contextlib
import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pydantic import Field

from jtrain.cli.arguments import Arguments, find_config, parse_step
from jtrain.cli.output import is_first_process, print_error, redirect_output
from jtrain.cli.output import print_text as print
from jtrain.config.configclass import configclass
from jtrain.config.node import DEFAULT, TYPED, Node, SourceLocation, raise_invalid
from jtrain.config.resolve import check, resolve
from jtrain.errors import ConfigError
from jtrain.train.experiment import Prompt, RunConfig

OPTIONS = ("tokens", "temperature", "top_k", "top_p", "seed")


def main(argv: Sequence[str]) -> int:
    """Print the text; return the exit code."""
    args = _arguments().parse(argv)
    path = find_config(args.run, "sample")
    resolved = resolve(path, args.settings)
    prompt, seed = _parse_prompt({name: getattr(args, name) for name in OPTIONS}, args.prompt)

    step = parse_step(args.step, "sample")
    with redirect_output():
        step, text = _complete(resolved.config, path.parent, step, prompt, seed)
    if not is_first_process():
        return 0
    if args.json:
        print(json.dumps({"run": str(args.run), "step": step, "text": text}))
    else:
        print(text)
    return 0


def _complete(
    config: RunConfig, directory: Path, step: Any, prompt: Prompt, seed: int
) -> tuple[int, str]:
    """Return a step of a run, and a text that its model generates.

    The prompt goes to the experiment's `complete`; an experiment with only `sample` takes none.
    """
    import jax

    from jtrain.train.restore import restore_run

    found, program, state = restore_run(config, directory, step, print_error)
    complete, sample = program.resolved.experiment.complete, program.resolved.experiment.sample
    if complete is None and sample is None:
        raise ConfigError(
            f"experiment {config.experiment} generates no text: it has no `complete` and no "
            f"`sample`. Add one: jt.Experiment(..., complete=lambda params, extra, key, prompt: "
            f"text)."
        )
    if complete is None and prompt.text:
        raise ConfigError(
            f"experiment {config.experiment} takes no prompt: it has a `sample` and no "
            f"`complete`. Omit the prompt."
        )
    params, extra, _ = program.gather_weights(state)
    key = jax.random.key(seed)
    if complete is not None:
        return found, complete(params, extra, key, prompt)
    assert sample is not None, "checked above"
    return found, sample(params, extra, key)


def _parse_prompt(options: dict[str, str | None], text: str) -> tuple[Prompt, int]:
    """Return the prompt and the seed, validated like a config."""

    @configclass
    class _PromptOptions(Prompt):
        seed: int = Field(default=0, ge=0, lt=2**32)

    values = {"text": Node(text, DEFAULT)}
    for name, word in options.items():
        if word is not None:
            setting = f"--{name.replace('_', '-')}={word}"
            values[name] = Node(_number(word), SourceLocation(TYPED, setting=setting))
    asked, wrong = check(_PromptOptions, Node(values, DEFAULT))
    raise_invalid(wrong)
    assert asked is not None, "stop() raised if validation failed"
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
        "Write a text sampled from a checkpoint of a run: the prompt and its continuation.",
        "runs/shakespeare",
        "shakespeare --prompt 'ROMEO:' --tokens 200 --temperature 0.7",
        "shakespeare --prompt 'ROMEO:' --top-k 20 --top-p 0.9 --seed 3 --json",
    )
    parser.add_run(settings="parallel")
    parser.add_argument(
        "--prompt", default="", help="the beginning of the text; default: the experiment's prompt"
    )
    parser.add_argument("--tokens", help="tokens to draw (400)")
    parser.add_argument("--temperature", help="below 1 sharpens, 0 takes the likeliest (0.8)")
    parser.add_argument("--top-k", help="draw from the K likeliest tokens; 0 from all (0)")
    parser.add_argument("--top-p", help="draw from the likeliest tokens that sum to this (1)")
    parser.add_argument("--seed", help="seed of the draws (0)")
    parser.add_step()
    parser.add_json()
    return parser
