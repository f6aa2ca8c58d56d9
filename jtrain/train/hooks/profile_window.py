"""A profiler trace of a window of steps, written while a run trains."""

import contextlib
import dataclasses
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax

from jtrain.core.loop import StatelessHook
from jtrain.core.types import Metrics
from jtrain.distributed.heartbeat import HEARTBEAT, Heartbeat
from jtrain.errors import ConfigError
from jtrain.io.formatting import format_bytes

ROOM = 200_000_000  # bytes that must be free; 6 steps of configs/shakespeare.yaml take 3 MB
STEP, PHASE = "train", "jtrain: "  # names in the trace


@dataclasses.dataclass(frozen=True)
class StepWindow:
    """The steps `first` .. `last`, counted from 1."""

    first: int
    last: int

    @classmethod
    def parse(cls, text: str, option: str = "--profile") -> "StepWindow":
        """Read `10:15`.

        Raises:
            ConfigError: if it is no such window.
        """
        found = re.fullmatch(r"(\d+):(\d+)", text)
        if found is None:
            raise ConfigError(f"{option} {text} is no window of steps; write {option} 10:15")
        first, last = int(found[1]), int(found[2])
        if first > last:
            raise ConfigError(
                f"{option} {text} ends before it begins; write {option} "
                f"{max(2, last)}:{max(2, first)}"
            )
        if first < 2:
            raise ConfigError(
                f"{option} {text} begins with step {first}: the first step of a process warms up, "
                f"and is not measured. Write {option} 2:{max(last, 2)}"
            )
        return cls(first, last)

    def check_steps(self, steps: int, option: str = "--profile") -> None:
        """Raise unless a run of `steps` steps takes all steps of the window.

        Raises:
            ConfigError: if it is too short, with the last window that fits.
        """
        if self.last <= steps:
            return
        first = max(2, steps - (self.last - self.first))
        shorter = f"write {option} {first}:{steps}, or " if steps >= 2 else ""
        raise ConfigError(
            f"{option} {self.first}:{self.last} ends after the run, which has {steps} steps; "
            f"{shorter}raise steps (steps={self.last})"
        )

    def __str__(self) -> str:
        return f"{self.first}:{self.last}"


class ProfileWindow(StatelessHook):
    """Hook that traces the calls of a window of steps, with the phases of the host in the trace.

    It waits for the devices before and after the window. A trace that cannot be written is
    reported, and the run goes on.

    Args:
        window: the steps; with several steps a call, all calls that take any of them.
        folder: for the files of the trace.
        log: takes a line.
    """

    def __init__(
        self,
        window: StepWindow,
        folder: Path,
        *,
        steps_per_call: int = 1,
        log: Callable[[str], object] = print,
        heartbeat: Heartbeat = HEARTBEAT,
    ):
        self.every = steps_per_call
        self.call_ends = window.first - 1, window.last
        """Steps at which a call ends, where calls may be shorter."""
        self.traced: tuple[int, int] | None = None
        """First and last step of the trace; None while there is none."""
        self._window, self._folder, self._log = window, folder, log
        self._heartbeat = heartbeat
        self.follow(lambda step: step + steps_per_call)
        self._first = 0  # step of the trace, while it is written
        self._over = False
        self._step, self._phase = contextlib.ExitStack(), contextlib.ExitStack()

    def follow(self, after: Callable[[int], int], start: int = 0) -> None:
        """Take the calls of a run, which may be shorter than `steps_per_call`.

        Args:
            after: gives the last step of the call after a step.
            start: the step that the run resumes from.
        """
        self._after = after
        # The steps in flight are done when the hook has waited for the devices. If they were
        # reported after that, they would seem to take no time.
        self.settles = after(after(start)) >= self._window.first

    def on_state(self, step: int, state: Any, metrics: Metrics) -> None:
        """Begin or end the trace."""
        if self._over:
            return
        self._step.close()
        after = self._after(step)
        if self._first and step >= self._window.last:
            self._stop(step, metrics)
        elif not self._first and after >= self._window.first:
            if step >= self._window.last:
                self._over = True
                self._log(f"no profile: the run resumed after steps {self._window}")
                return
            self._start(step, metrics)
        if self._first:
            self._step.enter_context(jax.profiler.StepTraceAnnotation(STEP, step_num=after))
            turn = after >= self._window.last
        else:
            turn = self._after(after) >= self._window.first
        self.settles = turn and not self._over

    def finish(self, step: int) -> None:
        """End a trace that a run has begun, and say so where it has none.

        Args:
            step: the last step of the run.
        """
        self._step.close()
        if self._first:
            self._stop(step, {})
        elif not self._over and self.traced is None:
            past = step >= self._window.last
            why = "had taken" if past else f"ended at step {step}, before"
            self._log(f"no profile: the run {why} steps {self._window}{' before' * past}")

    def _start(self, step: int, metrics: Metrics) -> None:
        jax.block_until_ready(metrics)
        try:
            shutil.rmtree(self._folder, ignore_errors=True)
            self._folder.mkdir(parents=True)
            free = shutil.disk_usage(self._folder).free
            if free < ROOM:
                raise OSError(
                    f"{format_bytes(free)} are free, and a trace needs up to {format_bytes(ROOM)}"
                )
            options = jax.profiler.ProfileOptions()
            options.python_tracer_level = 0  # it would slow the host down
            jax.profiler.start_trace(str(self._folder), profiler_options=options)
        except (OSError, RuntimeError, ValueError) as error:
            self._give_up(error)
            return
        self._first = step + 1
        self._heartbeat.observer = self._enter_phase

    def _stop(self, step: int, metrics: Metrics) -> None:
        jax.block_until_ready(metrics)
        self._heartbeat.observer = None
        self._phase.close()
        first, self._first, self._over = self._first, 0, True
        try:
            jax.profiler.stop_trace()
        except (OSError, RuntimeError, ValueError) as error:
            self._give_up(error)
            return
        self.traced = first, step

    def _enter_phase(self, phase: str) -> None:
        self._phase.close()
        self._phase.enter_context(jax.profiler.TraceAnnotation(PHASE + phase))

    def _give_up(self, error: Exception) -> None:
        self._over = True
        reason = str(error).partition("\n")[0].rstrip(".")
        self._log(f"no profile of steps {self._window}: {reason}. The run goes on without it.")
