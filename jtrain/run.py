"""Wire an experiment into a run: the one module that sees all of the above."""

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Literal, TextIO, TypeAlias

import jax

from jtrain.assemble import Assembly, assemble
from jtrain.cache import keep_compiled_programs
from jtrain.checkpoint import Checkpoints
from jtrain.data import ReadAhead
from jtrain.directory import MAY_DIFFER, Directory, environment
from jtrain.errors import CheckpointError, ConfigError
from jtrain.experiment import Prompt, RunConfig
from jtrain.hooks.evaluating import Results
from jtrain.hooks.metrics import results
from jtrain.hooks.pictures import write_pictures
from jtrain.hooks.plain import Observer
from jtrain.hooks.signals import Signals
from jtrain.loop import Ended, Stop, train
from jtrain.state import TrainState
from jtrain.step import StepFn
from jtrain.trackers import check_installed
from jtrain.watch import Watch, opening

Status: TypeAlias = Literal["done", "stopped", "failed"]
ENDS: Mapping[str, Status] = {"finished": "done", "interrupted": "stopped", "failed": "failed"}


@dataclasses.dataclass(frozen=True)
class Outcome:
    """How a run ended."""

    directory: Directory
    status: Status
    step: int
    why: str
    sets: Mapping[str, Results]
    """Of each set, the first first, and each step at which it was evaluated the numbers."""
    sample: str = ""

    @property
    def results(self) -> Results:
        """Those of the first set; none if there is no set."""
        return next(iter(self.sets.values()), {})


def run(
    config: RunConfig,
    *,
    source: Path | None = None,
    hooks: Sequence[Observer] = (),
    screen: TextIO | None = None,
    directory: Path | None = None,
    again: str = "",
) -> Outcome:
    """Trains `config` in runs/NAME, or goes on where that run was stopped.

    Args:
        source: the file the config was read from, for advice.
        hooks: observers of your own, beside those of the config; plain functions too, by the names
            of what they take: (step, numbers), (step, state) or (step, results).
        screen: where it is told; standard output by default.
        directory: of the run, where it is not runs/NAME.
        again: what to do to go on with it; `jtrain run DIRECTORY/config.yaml` by default.

    Raises:
        UserError: for what config, data or disk do not allow; then nothing was trained.
    """
    keep_compiled_programs()
    config = config if config.name else dataclasses.replace(config, name=config.experiment)
    there = Directory(directory or Path("runs") / config.name, again)
    another = f"name={config.name}-2"
    another = another if again else f"jtrain run {source or 'CONFIG'} ... {another}"
    changed = there.refuse_another(
        config, f"Start a new run: {another}\nor go on with that one: {there.again}"
    )
    stands = there.stands()
    if stands.get("status") == "done":
        found = {name: results(there.metrics, name) for name in stands.get("sets", ["valid"])}
        return Outcome(there, "done", stands["step"], "it was finished before", found)
    check_installed(config.trackers)
    kept = config.checkpoint
    with (
        Signals(every=config.steps_per_call) as signals,
        Checkpoints(there.checkpoints, keep=kept.keep, best=kept.best) as checkpoints,
    ):
        checkpoints.prepare()  # beside the compiler
        parts = assemble(config)
        checkpoints.check_room(parts.like)
        start = checkpoints.newest()
        # A run that goes on has all in its checkpoint, wherever its first parameters came from.
        begins = parts.begins.lines() if start is None and parts.begins else []
        restored = functools.partial(checkpoints.restore, start or 0, parts.like)
        step, state = compiled(parts, parts.fresh if start is None else restored)
        there.begin(config)
        with (
            Watch(parts, there, checkpoints, start=start, screen=screen) as watch,
            reader(parts, start or 0) as feed,
        ):
            watch.waited = lambda: feed.waited
            for line in [*opening(parts, start), *begins, *changed]:
                watch.lines.say(line)
            facts = {"sets": list(parts.sets), **environment(jax.devices())}
            there.say("running", step=start or 0, **facts)
            observers, over = [signals, *watch.hooks(hooks, state)], watch.over()
            ended = train(
                step,
                state,
                feed,
                start=start or 0,
                stop=start if start and over else parts.config.steps,
                hooks=observers,
                steps_per_call=config.steps_per_call,
            )
            ended = dataclasses.replace(ended, stop=ended.stop or over) if start else ended
            return _finish(parts, there, checkpoints, watch, ended)


def measure(
    config: RunConfig, directory: Path, step: int | Literal["newest", "best"] = "newest"
) -> tuple[int, Mapping[str, Mapping[str, float]]]:
    """A step of the run in a directory, and by set its metrics over the whole of it.

    Raises:
        CheckpointError: if there is no such checkpoint.
        ConfigError: if the values are not those of the run, or it has no validation set.
    """
    parts, there = _again(config, directory)
    if not parts.sets:
        raise ConfigError(f"experiment {config.experiment} gives no `valid` to measure a run by.")
    found, state = _restored(parts, there, step)
    return found, {name: parts.measure(state, name) for name in parts.sets}


def complete(
    config: RunConfig,
    directory: Path,
    prompt: Prompt,
    *,
    seed: int = 0,
    step: int | Literal["newest", "best"] = "newest",
) -> tuple[int, str]:
    """A step of the run in a directory, and a text in its hand.

    The prompt goes to the experiment's `complete`; one that has only `sample` takes none.

    Raises:
        CheckpointError: if there is no such checkpoint.
        ConfigError: if the values are not those of the run, or the experiment writes no text.
        DataError: if the experiment's data does not know what the prompt says.
    """
    parts, there = _again(config, directory)
    x = parts.experiment
    if x.complete is None and x.sample is None:
        raise ConfigError(
            f"experiment {config.experiment} writes nothing: it gives no `complete` and no "
            f"`sample`. Give it one: jt.Experiment(..., complete=lambda params, extra, key, "
            f"prompt: text)."
        )
    if x.complete is None and prompt.text:
        raise ConfigError(
            f"experiment {config.experiment} takes no prompt: it gives a `sample` and no "
            f"`complete`. Leave the prompt out."
        )
    found, state = _restored(parts, there, step)
    known = parts.evaluation_params(state), state.extra, jax.random.key(seed)
    if x.complete is not None:
        return found, x.complete(*known, prompt)
    assert x.sample is not None, "one of the two is there"
    return found, x.sample(*known)


def trained(
    config: RunConfig, directory: Path, step: int | Literal["newest", "best"] = "newest"
) -> tuple[int, Assembly, TrainState]:
    """A step of the run in a directory, the parts of the run, and the state after that step.

    Raises:
        CheckpointError: if there is no such checkpoint.
        ConfigError: if the values are not those of the run.
    """
    parts, there = _again(config, directory)
    found, state = _restored(parts, there, step)
    return found, parts, state


def _again(config: RunConfig, directory: Path) -> tuple[Assembly, Directory]:
    """The parts of a run that was trained before, and where it lies."""
    keep_compiled_programs()
    there = Directory(directory)
    there.refuse_another(config, f"Leave them as they are; {', '.join(MAY_DIFFER)} may differ.")
    return assemble(config), there


def _restored(
    parts: Assembly, there: Directory, step: int | Literal["newest", "best"]
) -> tuple[int, TrainState]:
    with Checkpoints(there.checkpoints, best=parts.config.checkpoint.best) as checkpoints:
        named = {"newest": checkpoints.newest, "best": checkpoints.best}
        found = named[step]() if isinstance(step, str) else step
        if found is None and not checkpoints.steps():
            raise CheckpointError(
                f"{there.checkpoints} has no checkpoint: no state of this run was saved. Train it: "
                f"jtrain run {there.config}"
            )
        if found is None:
            raise CheckpointError(
                f"{there.checkpoints} has no {step} checkpoint; it has steps "
                f"{checkpoints.steps() or 'none'}. The best is kept where checkpoint.best names a "
                f"metric."
            )
        return found, checkpoints.restore(found, parts.like)


def compiled(parts: Assembly, make: Callable[[], TrainState]) -> tuple[StepFn, TrainState]:
    """The compiled step, and the state that `make` gives beside its compilation."""
    with ThreadPoolExecutor(1) as beside:
        state, checked = beside.submit(make), beside.submit(parts.check_evaluation)
        step = parts.compile_step()
        checked.result()
        return step, state.result()


def reader(parts: Assembly, start: int) -> ReadAhead:
    """What each call of the step takes, from step `start` on."""
    calls, each = parts.calls, parts.config.steps_per_call
    read = lambda call: parts.place(calls[call])
    return ReadAhead(read, start=start // each, stop=parts.config.steps // each)


def _finish(
    parts: Assembly,
    directory: Directory,
    checkpoints: Checkpoints,
    watch: Watch,
    ended: Ended[TrainState],
) -> Outcome:
    """Keeps the last state, says how it ended, and shows what was learned."""
    x, stop = parts.experiment, ended.stop or Stop("", "finished")
    done, sample = stop.kind == "finished", ""
    for evaluation in watch.evaluations.values() if done else ():
        evaluation.at(ended.step, ended.state)
    watch.save.at(ended.step, ended.state)
    if done and x.sample is not None:
        with watch.pause("sampling"):
            params = parts.evaluation_params(ended.state)
            sample = x.sample(params, ended.state.extra, ended.state.step_key())
        directory.samples.write_text(sample + "\n")
    if done and x.pictures is not None:
        with watch.pause("drawing"):
            known = parts.evaluation_params(ended.state), ended.state.extra
            pictures = x.pictures(*known, ended.state.step_key())
            write_pictures(directory.pictures, ended.step, pictures)
    checkpoints.wait()  # what is announced is on the disk
    status, why = ENDS[stop.kind], stop.why
    if status == "failed":
        why = f"{why} {parts.not_finite(ended.step)}"
    watch.ended(status)
    directory.say(status, step=ended.step, why=why)
    found = {name: evaluation.results for name, evaluation in watch.evaluations.items()}
    return Outcome(directory, status, ended.step, why, found, sample)
