"""A run's language model for EleutherAI's lm-evaluation-harness (`pip install 'jtrain[lm-eval]'`).

```python
import lm_eval
from jtrain.train import JtrainLM

lm_eval.simple_evaluate(model=JtrainLM("chat"), tasks=["hellaswag"])
```
"""

import itertools
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np

from jtrain.data.sources.source import import_optional
from jtrain.data.text.tokenizers import Tokenizer, decode_known
from jtrain.errors import ConfigError
from jtrain.finetune.lora import extra_of_model
from jtrain.models.generate import IncrementalModel, generate_answers
from jtrain.train.answers import empty_prompt, with_bias
from jtrain.train.loaded_run import LoadedRun, load
from jtrain.train.tasks import BLOCK, Row, find_complete, make_scores, score_rows

_WHAT = "an evaluation by lm-eval"
_model = import_optional("lm_eval.api.model", "lm-eval", _WHAT)
_registry = import_optional("lm_eval.api.registry", "lm-eval", _WHAT)
_utils = import_optional("lm_eval.utils", "lm-eval", _WHAT)


@_registry.register_model("jtrain")
class JtrainLM(_model.TemplateLM):
    """A model of lm-eval. Texts are tokens and scores as with lm-eval's own `HFLM`, in one process.

    Args:
        run: a run, or its name or directory.
        step: of a checkpoint, the newest, or the best.
        batch_size: rows at a time, over all devices.
        max_gen_toks: most tokens of a text whose task does not say so.
        prefix_token_id: token before a text without a context; by default the end of a document.
    """

    def __init__(
        self,
        run: LoadedRun | Path | str,
        step: int | Literal["newest", "best"] = "newest",
        *,
        batch_size: int = 16,
        max_gen_toks: int = 256,
        prefix_token_id: int | None = None,
    ):
        super().__init__()
        self._run = run if isinstance(run, LoadedRun) else load(run, step)
        complete = find_complete(self._run)
        self._tokenizer: Tokenizer = complete.tokenizer
        self._writer: IncrementalModel = complete.build()
        self._scores = make_scores(self._run)
        unless_given = int(empty_prompt(self._tokenizer)[0])
        self._prefix = unless_given if prefix_token_id is None else prefix_token_id
        self.batch_size, self.max_gen_toks = int(batch_size), max_gen_toks

    @property
    def max_length(self) -> int:
        """Most tokens that the model reads."""
        return self._writer.context

    @property
    def eot_token_id(self) -> int:
        """Token that ends a document."""
        return self._prefix if self._tokenizer.end is None else self._tokenizer.end

    @property
    def prefix_token_id(self) -> int:
        """Token before a text that has no context."""
        return self._prefix

    def tok_encode(self, string: str, *unused: Any, **unused_by_name: Any) -> list[int]:
        """Return the tokens of a text, without any that a tokenizer adds."""
        del unused, unused_by_name
        return self._tokenizer.encode(string, special=True).tolist()

    def _loglikelihood_tokens(
        self, requests: Sequence[tuple[Any, list[int], list[int]]], **unused: Any
    ) -> list[tuple[float, bool]]:
        del unused
        rows = [self._row(context, text) for _, context, text in requests]
        blocks = [-(-(len(row.tokens) - 1) // BLOCK) for row in rows]
        widths = [1 << (count - 1).bit_length() for count in blocks]  # few programs: powers of 2
        found: dict[int, tuple[float, bool]] = {}
        for width in sorted(set(widths)):
            at = [i for i, each in enumerate(widths) if each == width]
            some, how = [rows[i] for i in at], {"context": self.max_length}
            scores = score_rows(self._run, some, self._scores, batch=self.batch_size, **how)
            found |= {i: (x.log_prob, x.greedy) for i, x in zip(at, scores, strict=True)}
        return [found[i] for i in range(len(rows))]

    def _row(self, context: list[int], text: list[int]) -> Row:
        """Return the tokens of both; a context that is too long loses its beginning."""
        if len(text) > self.max_length:
            raise ConfigError(
                f"a text to score has {len(text)} tokens, and the model reads {self.max_length}: "
                f"leave its task out"
            )
        tokens = np.array([*context, *text], np.int32)[-(self.max_length + 1) :]
        return Row(tokens, len(tokens) - len(text))

    def loglikelihood_rolling(self, requests: Sequence[Any], **unused: Any) -> list[float]:
        """Return the log-probability of each text, in windows of the model's context."""
        del unused
        windows, counts = [], []
        for request in requests:
            (text,) = request.args
            found = _utils.get_rolling_token_windows(
                token_list=self.tok_encode(text),
                prefix_token=self.prefix_token_id,
                max_seq_len=self.max_length,
                context_len=1,
            )
            parts = [(None, *_utils.make_disjoint_window(window)) for window in found]
            windows += parts
            counts.append(len(parts))
        scores = iter(self._loglikelihood_tokens(windows))
        return [sum(log_prob for log_prob, _ in itertools.islice(scores, n)) for n in counts]

    def generate_until(self, requests: Sequence[Any], **unused: Any) -> list[str]:
        """Return the likeliest tokens after each context, up to the first text of `until`."""
        del unused
        steps = [self._steps(request.args[1]) for request in requests]
        prompts = [
            (self.tok_encode(request.args[0]) or [self._prefix])[-max(self.max_length - count, 1) :]
            for request, count in zip(requests, steps, strict=True)
        ]
        order = sorted(range(len(prompts)), key=lambda i: (steps[i], len(prompts[i])))
        texts: dict[int, str] = {}
        for count, group in itertools.groupby(order, key=lambda i: steps[i]):
            while some := list(itertools.islice(group, self.batch_size)):
                texts |= zip(some, self._write([prompts[i] for i in some], count), strict=True)
        stops = (request.args[1].get("until") or [] for request in requests)
        return [_cut(texts[i], until) for i, until in enumerate(stops)]

    def _steps(self, how: Mapping[str, Any]) -> int:
        """Return the most tokens of a text, by one of the names that tasks use."""
        if how.get("do_sample", how.get("temperature", 0) > 0):
            raise ConfigError(
                "a task draws tokens (do_sample), and JtrainLM takes the likeliest: give "
                "gen_kwargs='do_sample=False'"
            )
        names = ("max_gen_toks", "max_new_tokens", "max_tokens", "max_completion_tokens")
        return int(next((how[name] for name in names if name in how), self.max_gen_toks))

    def _write(self, prompts: list[list[int]], steps: int) -> list[str]:
        """Return the texts of the likeliest tokens after each prompt, up to a document's end."""
        lengths = [len(prompt) for prompt in prompts]
        longest = max(min(-(-max(lengths) // BLOCK) * BLOCK, self.max_length - steps), max(lengths))
        padded = np.zeros((self.batch_size, longest), np.int32)
        for row, prompt in zip(padded, prompts, strict=False):
            row[: len(prompt)] = prompt
        sizes = np.array([*lengths, *[lengths[0]] * (self.batch_size - len(prompts))], np.int32)
        end = self._tokenizer.end
        text, ends = jax.device_get(
            generate_answers(
                self._writer,
                with_bias(self._writer, self._run.merged, extra_of_model(self._run.extra)),
                jnp.asarray(padded),
                jnp.asarray(sizes),
                start=max(min(lengths) // BLOCK * BLOCK, 1),
                steps=steps,
                stop=() if end is None else (end,),
            )
        )
        answers = [row[n:last] for row, n, last in zip(text, lengths, ends, strict=False)]
        return [decode_known(self._tokenizer, answer) for answer in answers]


def _cut(text: str, until: str | Sequence[str]) -> str:
    """Return the text before the first of `until` that it has."""
    for stop in [until] if isinstance(until, str) else until:
        text = text.partition(stop)[0] if stop else text
    return text
