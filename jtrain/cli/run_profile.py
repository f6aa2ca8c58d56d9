"""`jtrain run CONFIG --profile 10:15`: a trace of some steps, read when the run has ended."""

import contextlib
import dataclasses
import os

import jax

from jtrain.cli.output import print_text as print
from jtrain.config.top import RUNS
from jtrain.distributed.cluster import detect
from jtrain.errors import UserError
from jtrain.inspect.profile import FOLDER, format_profile, summarize_trace
from jtrain.train.experiment import RunConfig
from jtrain.train.hooks.profile_window import ProfileWindow, StepWindow
from jtrain.train.program import set_up
from jtrain.train.run_result import RunResult


@dataclasses.dataclass(frozen=True)
class RunProfile:
    """A profile of a run: the hook that traces, and the summary at the end."""

    config: RunConfig
    hook: ProfileWindow

    def finish(self, outcome: RunResult) -> None:
        """Read the trace, write its summary into the run's directory, and print it."""
        self.hook.finish(outcome.step)
        steps = self.hook.traced
        if steps is None or not outcome.directory.first:
            return
        found = summarize_trace(outcome.directory.path, steps, self._program())
        if found is not None:
            print(f"\n{format_profile(found)}")
            print(f"to print this again: jtrain show {outcome.directory.path.name} --profile")

    def _program(self) -> str:
        """Return the text of the compiled step, whose names tell modules; empty if unreadable."""
        if jax.process_count() > 1:
            return ""
        with contextlib.suppress(UserError, jax.errors.JaxRuntimeError):
            return set_up(self.config).lower_step().compile().as_text() or ""
        return ""


def open_profile(window: str, config: RunConfig) -> RunProfile:
    """Return the profile of a window such as `10:15`.

    Raises:
        ConfigError: if it is no window of steps of the run.
    """
    steps = StepWindow.parse(window)
    if isinstance(config.steps, int):
        steps.check_steps(config.steps)
    place = detect(os.environ)
    folder = RUNS / config.run_name / FOLDER
    several = folder.with_name(f"{FOLDER}-{place.index}") if place.index else folder
    hook = ProfileWindow(steps, several, steps_per_call=config.steps_divisor)
    return RunProfile(config, hook)
