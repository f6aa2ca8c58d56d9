"""A profiler trace of a window of steps, written while a run trains."""

import contextlib
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import jax

from jtrain.core.loop import NEVER, Hook
from jtrain.distributed.heartbeat import HEARTBEAT
from jtrain.errors import ConfigError

STEP, PHASE = "train", "jtrain: "  # names in the trace


class StepWindow(NamedTuple):
    """The steps `first` .. `last`, counted from 1."""

    first: int
    last: int

    @classmethod
    def parse(cls, text: str, steps: int | None) -> "StepWindow":
        """Read `10:15`, of a run of `steps` steps; None if these are not known yet.

        Raises:
            ConfigError: if it is no such window, or ends after the run.
        """
        found = re.fullmatch(r"(\d+):(\d+)", text)
        window = cls(*map(int, found.groups())) if found else cls(0, 0)
        if not 2 <= window.first <= window.last:
            raise ConfigError(
                f"--profile {text} is not a window of steps; write --profile 10:15. It begins with "
                f"step 2 or later, as the first step of a process warms up."
            )
        if steps is not None and window.last > steps:
            first = max(2, steps - (window.last - window.first))
            shorter = f"write --profile {first}:{steps}, or " if steps >= 2 else ""
            raise ConfigError(
                f"--profile {window} ends after the run, which has {steps} steps; {shorter}raise "
                f"steps (steps={window.last})"
            )
        return window

    def __str__(self) -> str:
        return f"{self.first}:{self.last}"


class ProfileWindow(Hook):
    """Hook that traces the calls of a window of steps, with the phases of the host in the trace.

    The trace starts and stops between calls, when the devices are idle. A trace that cannot be
    written is reported, and the run goes on.

    Args:
        window: the steps; with several steps a call, all calls that take any of them.
    """

    def __init__(
        self,
        window: StepWindow,
        folder: Path,
        *,
        steps_per_call: int = 1,
        log: Callable[[str], object] = print,
    ):
        self.traced: tuple[int, int] | None = None
        """First and last step of the trace; None while there is none."""
        self._window, self._folder, self._log = window, folder, log
        each = steps_per_call
        self._begin = max((window.first - 1) // each, 1) * each
        self._end = max(-(-window.last // each) * each, self._begin + each)
        self._number = 0  # newest step
        self._traces = self._over = False
        self._phase = contextlib.ExitStack()

    def next_state(self, step: int) -> int:
        """Return the step before the trace, then its last."""
        return next((at for at in (self._begin, self._end) if at > step), NEVER)

    def wrap(self, step: Callable, after: Callable[[int], int], start: int) -> Callable:
        """Return the step, whose calls in the window are marked in the trace.

        Args:
            after: gives the last step of the call after a step.
            start: the step that the run resumes from.
        """
        self._number = start

        def marked_step(state: Any, batch: Any) -> Any:
            self._number = after(self._number)
            if not self._traces:
                return step(state, batch)
            with jax.profiler.StepTraceAnnotation(STEP, step_num=self._number):
                return step(state, batch)

        return marked_step

    def on_state(self, step: int, state: Any) -> None:
        """Begin or end the trace: all calls are done."""
        if step == self._begin:
            self._start()
        elif self._traces:
            self._stop(step)

    def finish(self, step: int) -> None:
        """End a trace that a run has begun, and say so where it has none."""
        if self._traces:
            self._stop(step)
        elif not self._over and self.traced is None:
            if step >= self._window.last:
                self._log(f"no profile: the run had taken steps {self._window} before")
            else:
                self._log(f"no profile: the run ended at step {step}, before steps {self._window}")

    def _start(self) -> None:
        try:
            shutil.rmtree(self._folder, ignore_errors=True)
            self._folder.mkdir(parents=True)
            options = jax.profiler.ProfileOptions()
            options.python_tracer_level = 0  # it would slow the host down
            jax.profiler.start_trace(str(self._folder), profiler_options=options)
        except (OSError, RuntimeError, ValueError) as error:
            self._give_up(error)
            return
        self._traces = True
        HEARTBEAT.observer = self._enter_phase

    def _stop(self, step: int) -> None:
        HEARTBEAT.observer = None
        self._phase.close()
        self._traces, self._over = False, True
        try:
            jax.profiler.stop_trace()
        except (OSError, RuntimeError, ValueError) as error:
            self._give_up(error)
            return
        self.traced = self._begin + 1, step

    def _enter_phase(self, phase: str) -> None:
        self._phase.close()
        self._phase.enter_context(jax.profiler.TraceAnnotation(PHASE + phase))

    def _give_up(self, error: Exception) -> None:
        self._over = True
        reason = str(error).partition("\n")[0].rstrip(".")
        self._log(f"no profile of steps {self._window}: {reason}. The run goes on without it.")
