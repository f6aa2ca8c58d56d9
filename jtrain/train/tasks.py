"""Tasks of a language model: choices by their likelihood, answers by a match with what it writes.

A choice is scored as by EleutherAI's lm-evaluation-harness: `accuracy` by the sum of the
log-probabilities of its tokens after the context, `accuracy_norm` by this sum a character.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from pydantic import Field, TypeAdapter, ValidationError

from jtrain.config.configclass import configclass
from jtrain.core.precision.cast import cast_params
from jtrain.core.types import Batch, Params
from jtrain.data.text.tokenizers import Tokenizer
from jtrain.errors import ConfigError, DataError, did_you_mean
from jtrain.io.regular_files import open_regular, parse_json
from jtrain.losses.cross_entropy import cross_entropy_per_label
from jtrain.parallel.custom_loop import gather
from jtrain.train.answers import Verifier, empty_prompt, same_number, same_text
from jtrain.train.experiment import Prompt
from jtrain.train.loaded_run import LoadedRun

MATCHES: Mapping[str, Verifier] = {
    "text": same_text,
    "number": same_number,
    "contains": lambda written, expected: float(expected.strip() in written),
}
BLOCK = 32  # tokens: rows are padded to a multiple, so that another file rarely needs a program
SIGMA = 1.959964  # of a normal distribution, within which 95 % lie


@configclass
class Task:
    """A context with its choices, or one whose continuation is matched with the answer."""

    context: str
    answer: str | int
    """A text; or the number of a choice, from 0."""
    choices: list[Annotated[str, Field(min_length=1)]] = Field(default_factory=list)
    match: str = ""
    """`text`, `number`, `contains`, or a name of `matches`."""
    tokens: int = Field(default=64, ge=1)
    """Most tokens that are written."""
    until: str = "\n"
    """What was written is cut before this text; empty: it is not."""

    @property
    def wanted(self) -> int:
        """The number of the right choice."""
        return self.answer if isinstance(self.answer, int) else self.choices.index(self.answer)


def read_tasks(path: Path, matches: Mapping[str, Verifier] = MATCHES) -> list[Task]:
    """Return the tasks in a file of JSON lines.

    Args:
        matches: functions of what was written and the answer, by the name in `match`.

    Raises:
        DataError: with the line that is no task, and what to write.
    """
    try:
        with open_regular(path) as file:
            lines = file.read().decode().split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"the tasks {path} cannot be read: {error}") from None
    tasks = []
    for number, line in enumerate(lines, 1):
        if line.strip():
            try:
                tasks.append(_task(parse_json(line), matches))
            except ValueError as error:
                raise DataError(f"line {number} of {path} is no task: {error}") from None
    if not tasks:
        raise DataError(f"{path} has no task: write a JSON object a line, with context and answer")
    return tasks


def _task(row: Any, matches: Mapping[str, Verifier]) -> Task:
    try:
        task = _TASK.validate_python(row)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"]))
        unknown = first["type"] == "unexpected_keyword_argument"
        near = did_you_mean(where, Task.__dataclass_fields__) if unknown else ""
        raise ValueError(f"{where}: {first['msg']}{near}") from None
    if bool(task.choices) == bool(task.match):
        raise ValueError(
            'give it either "choices", a list of texts, or "match", for a text that is written'
        )
    if task.match and task.match not in matches:
        near = did_you_mean(task.match, matches)
        raise ValueError(f"match {task.match!r} is none of {', '.join(matches)}{near}")
    count = len(task.choices)
    if task.choices and (count < 2 or task.answer not in [*task.choices, *range(count)]):
        raise ValueError(f"answer {task.answer!r} is to be one of two or more choices")
    return task


_TASK = TypeAdapter(Task)


def evaluate_tasks(
    run: LoadedRun,
    tasks: Sequence[Task],
    *,
    matches: Mapping[str, Verifier] = MATCHES,
    batch: int = 0,
) -> dict[str, float]:
    """Return the metrics of a run's model, with 95 % intervals by Wilson 1927 (`_low`, `_high`).

    `accuracy` and `accuracy_norm` are of the tasks with choices, `nats` is what the right choice
    costs there, and `match` the mean score of the others. The scores are those of each row by
    itself, so they do not depend on the devices.

    Args:
        batch: rows at a time, a row a choice; 0: 128.

    Raises:
        ConfigError: if the experiment has no language model.
        DataError: if a choice is longer than the model's context.
    """
    complete = find_complete(run)
    found: dict[str, float] = {"tasks": len(tasks)}
    if chosen := [task for task in tasks if task.choices]:
        found |= _score_choices(run, complete, chosen, batch)
    if written := [task for task in tasks if task.match]:
        scores = _score_answers(run, complete, written, matches)
        found |= _with_interval("match", float(np.mean(scores)), len(scores))
    return found


def find_complete(run: LoadedRun) -> Any:
    """Return the `complete` of a run's experiment, with its tokenizer.

    Raises:
        ConfigError: if the experiment has no language model.
    """
    complete = run.experiment and run.experiment.complete
    if run.model is None or not hasattr(complete, "tokenizer"):
        name = run.config.experiment if run.config else "jt.fit"
        raise ConfigError(
            f"{name} has no language model to give tasks to. Write jt.Experiment(..., "
            f"model=model, complete=jtrain.train.make_complete(network.build, tokenizer))."
        )
    return complete


class Row(NamedTuple):
    """Tokens of a context and a choice; those from `begin` on are scored."""

    tokens: np.ndarray  # n
    begin: int


class Score(NamedTuple):
    """Score of a row."""

    log_prob: float
    """Sum over the tokens that are scored, in nats."""
    greedy: bool
    """Whether each of these tokens is the likeliest."""


def score_rows(
    run: LoadedRun,
    rows: Sequence[Row],
    scores: Callable[[Params, Batch], Any],
    *,
    context: int,
    batch: int,
) -> list[Score]:
    """Return the score of each row, by a program for the longest of them.

    Args:
        scores: by `make_scores`; its programs are kept as long as it is.
        context: most tokens that the model reads; 0: any.
        batch: rows at a time; 0: 128.
    """
    longest = max(len(row.tokens) for row in rows) - 1
    length = -(-longest // BLOCK) * BLOCK
    length = min(length, context) if context else length
    tokens = np.zeros((len(rows), length + 1), np.int32)
    for padded, row in zip(tokens, rows, strict=True):
        padded[: len(row.tokens)] = row.tokens
    data = {
        "tokens": tokens,
        "begin": np.array([row.begin for row in rows], np.int32),
        "end": np.array([len(row.tokens) for row in rows], np.int32),
    }
    found = run.predict(data, scores, batch=batch)
    return [Score(float(x), bool(y)) for x, y in zip(*found, strict=True)]


def _score_choices(
    run: LoadedRun, complete: Any, tasks: Sequence[Task], batch: int
) -> dict[str, float]:
    context = getattr(getattr(run.config, "model", None), "context", 0)
    rows = [
        _encode(complete, task.context, choice, context)
        for task in tasks
        for choice in task.choices
    ]
    scores = iter(score_rows(run, rows, make_scores(run), context=context, batch=batch))
    right, right_norm, nats = 0, 0, 0.0
    for task in tasks:
        each = np.array([next(scores).log_prob for _ in task.choices], np.float64)
        right += int(each.argmax()) == task.wanted
        right_norm += int((each / [len(choice) for choice in task.choices]).argmax()) == task.wanted
        nats -= each[task.wanted]
    count = len(tasks)
    return {
        **_with_interval("accuracy", right / count, count),
        **_with_interval("accuracy_norm", right_norm / count, count),
        "nats": nats / count,
    }


def _encode(complete: Any, context: str, choice: str, most: int) -> Row:
    """Return the tokens of both; a context that is too long loses its beginning.

    White space at the end of the context belongs to the choice, with which a tokenizer joins it.
    """
    bare = context.rstrip()
    context, choice = bare, context[len(bare) :] + choice
    tokenizer: Tokenizer = complete.tokenizer
    before = np.asarray(complete.read(context) if context else empty_prompt(tokenizer))
    if context and complete.read == tokenizer.encode:
        tokens = np.asarray(tokenizer.encode(context + choice))
    else:
        tokens = np.concatenate([before, tokenizer.encode(choice)])
    begin, surplus = len(before), len(tokens) - 1 - most if most else 0
    if surplus >= begin:
        raise DataError(
            f"the choice {choice[:40]!r} has {len(tokens) - begin} tokens, and model.context is "
            f"{most}: leave the task out"
        )
    surplus = max(surplus, 0)
    return Row(tokens[surplus:].astype(np.int32), begin - surplus)


def make_scores(run: LoadedRun) -> Callable[[Params, Batch], tuple[jax.Array, jax.Array]]:
    """Return the function of the `log_prob` and `greedy` of each row, b and b, for `score_rows`."""
    model, dtype = run.model, run.config.precision.compute if run.config else None
    assert model is not None, "checked before"

    def scores(params: Params, batch: Batch) -> tuple[jax.Array, jax.Array]:
        tokens = batch["tokens"]
        logits, _ = model.apply(cast_params(params, dtype), run.extra, tokens[:, :-1])
        at, targets = jnp.arange(1, tokens.shape[1])[None], tokens[:, 1:]  # at: a target's position
        counted = (at >= batch["begin"][:, None]) & (at < batch["end"][:, None])
        log_probs = -jnp.where(counted, cross_entropy_per_label(logits, targets), 0).sum(-1)
        return log_probs, ((logits.argmax(-1) == targets) | ~counted).all(-1)

    return scores


def _score_answers(
    run: LoadedRun, complete: Any, tasks: Sequence[Task], matches: Mapping[str, Verifier]
) -> list[float]:
    weights = run.params, run.extra
    params, extra = weights if jax.process_count() == 1 else gather(weights)
    scores = []
    for task in tasks:
        prompt = Prompt(text=task.context, tokens=task.tokens, temperature=0.0)
        text = complete(params, extra, jax.random.key(0), prompt).removeprefix(task.context)
        text = text.partition(task.until)[0] if task.until else text
        scores.append(float(matches[task.match](text, f"{task.answer}")))
    return scores


def _with_interval(name: str, share: float, count: int) -> dict[str, float]:
    """Return a share with its interval; Wilson 1927, Journal of the ASA 22, 209."""
    spread = SIGMA**2 / count
    middle = (share + spread / 2) / (1 + spread)
    half = SIGMA / (1 + spread) * math.sqrt(share * (1 - share) / count + spread / (4 * count))
    return {name: share, f"{name}_low": middle - half, f"{name}_high": middle + half}
