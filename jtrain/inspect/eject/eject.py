"""`eject`: write a config as one file of jax, optax and numpy, and compare both."""

import contextlib
import dataclasses
import io
import json
import re
import runpy
import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np

from jtrain.core.pytree import named_leaves, num_elements
from jtrain.errors import UserError
from jtrain.inspect.eject.assemble import assemble
from jtrain.inspect.eject.describe import describe
from jtrain.io.environment import jtrain_version
from jtrain.io.regular_files import atomic_write
from jtrain.parallel import Single
from jtrain.train.experiment import RunConfig
from jtrain.train.program import Program
from jtrain.train.resolve import resolve

LARGE = 100_000_000  # parameters, above which both programs are not run


class Ejected(NamedTuple):
    """Files that were written, and the program that they stand for."""

    file: Path
    data: Path | None
    program: Program

    @property
    def size(self) -> int:
        """Number of parameters."""
        return num_elements(self.program.resolved.abstract_state.params)


def eject(config: RunConfig, file: Path, command: str = "") -> Ejected:
    """Write `config` as a program of its own, and its training set beside it.

    Raises:
        UserError: if a part of the config cannot be ejected, or a file cannot be written.
    """
    if file.suffix != ".py" or not file.stem.isidentifier():
        plain = re.sub(r"\W", "_", file.stem)
        raise UserError(
            f"jtrain eject: {file} is no file of Python that can be imported; write -o "
            f"{file.with_name(plain).with_suffix('.py')}"
        )
    resolved = resolve(dataclasses.replace(config, parallel=Single(), steps_per_call=1))
    found = describe(resolved, file.stem)
    imports, body = assemble(found.sections, found.values)
    text = f'"""{_head(config, found.arrays, command, file)}"""\n\n{imports}\n\n{body}\n'
    file.parent.mkdir(parents=True, exist_ok=True)
    data = None
    if found.arrays:
        data = file.with_suffix(".npz")
        arrays: Any = found.arrays
        np.savez(data, **arrays)
    atomic_write(file, text.encode())
    return Ejected(file, data, Program(resolved))


def _head(config: RunConfig, arrays: Mapping[str, Any], command: str, file: Path) -> str:
    beside = f"Its training set lies beside it, in {file.stem}.npz. " if arrays else ""
    path = config.init_from.path or getattr(getattr(config, "model", None), "pretrained", "")
    start = f" The run begins with the weights of {path}: give them by --params." if path else ""
    kind = config.parallel.kind
    layout = "" if kind in {"single", "mirrored"} else f" (parallel.kind={kind})"
    paragraphs = [
        f"{config.experiment}, as one file of jax, optax and numpy.",
        f"Written by jtrain {jtrain_version()}: {command}",
        f"{beside}With jax {jax.__version__} on a CPU it takes the steps of that run, bit for bit: "
        "functions with a custom_vjp save memory, and without it are the same up to rounding.",
        f"Left behind, and in jtrain: sharding beyond data parallel{layout}, resuming, the guard "
        "(but a step that is not finite is skipped), fused kernels, evaluation, the log and "
        f"samples.{start}",
    ]
    text = "\n\n".join(textwrap.fill(each, 99, break_long_words=False) for each in paragraphs)
    return text.replace("\\", "\\\\").replace('"', "'") + "\n"


class Comparison(NamedTuple):
    """Losses of both programs, and the parameters in which they differ after the last step."""

    ours: Sequence[float]
    theirs: Sequence[float]
    differs: Sequence[str]

    @property
    def first(self) -> int:
        """First step whose losses differ; 0 if none does."""
        pairs = enumerate(zip(self.ours, self.theirs, strict=True), 1)
        return next((step for step, (a, b) in pairs if a != b), 0)

    @property
    def same(self) -> bool:
        """Whether all losses and parameters are equal, bit for bit."""
        return not self.first and not self.differs

    def describe(self) -> str:
        """Return where both programs differ."""
        if not self.first:
            return f"the parameters differ after {len(self.ours)} steps: {', '.join(self.differs)}"
        ours, theirs = self.ours[self.first - 1], self.theirs[self.first - 1]
        return f"the loss of step {self.first} is {theirs} in the file and {ours} in jtrain"


def compare(ejected: Ejected, steps: int) -> Comparison:
    """Run both programs for some steps, in this process."""
    losses, state = run_jtrain(ejected.program, steps)
    theirs, params = run_ejected(ejected.file, ["--steps", str(steps), "--devices", "1"])
    mine, other = (named_leaves(jax.device_get(x)) for x in (state.params, params))
    names = [*mine, *(other.keys() - mine.keys())]
    same = lambda n: n in mine and n in other and np.array_equal(mine[n], other[n])
    return Comparison(losses, theirs, [n for n in names if not same(n)])


def run_jtrain(program: Program, steps: int) -> tuple[list[float], Any]:
    """Return the losses of jtrain's own steps, and the state after them."""
    take, state, batches = program.compile_step(), program.initial_state(), program.batches()
    losses = []
    for number in range(steps):
        state, metrics = take(state, program.place(batches.read(number)))
        losses.append(float(np.ravel(metrics["loss"].total)[0]))
    return losses, state


def run_ejected(file: Path, words: Sequence[str]) -> tuple[list[float], Any]:
    """Return the losses that an ejected file prints, and its parameters after its last step."""
    program = runpy.run_path(str(file), run_name="ejected")
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        state = program["main"](words)
    lines = [json.loads(line) for line in printed.getvalue().splitlines()]
    return [line["loss"] for line in lines], state["params"]
