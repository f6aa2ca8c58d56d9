"""Bad steps: the hooks that the config's `guard` asks for, and their log."""

import collections
import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import optax

from jtrain.config.sections import SkipPolicy
from jtrain.core.loop import Hook
from jtrain.core.precision.loss_scale import LossScale
from jtrain.core.state import TrainState
from jtrain.core.step import make_step
from jtrain.core.types import Batch
from jtrain.data.batches.scan import find_nonfinite
from jtrain.distributed.heartbeat import HEARTBEAT
from jtrain.parallel.offload import to_device
from jtrain.train.bad_steps import step_report
from jtrain.train.hooks.bad_steps import BadStep, BadStepGuard, BadStepLog, Done, NonfiniteData
from jtrain.train.hooks.skipped_steps import RecentSteps, SkippedSteps
from jtrain.train.run_dir import RunDir
from jtrain.train.setup import TrainSetup

RECENT = 16  # calls whose batches are kept: 8 in flight, and the prefetched ones


class OverflowCheck:
    """Check that recomputes the gradient of a recent batch at the smallest loss scale.

    The loss scale is lowered after each overflow, down to its minimum. A gradient that is not
    finite at the minimum is finite at no scale. The parameters are those of the newest state, some
    calls after the step, because the step's own are already donated.
    """

    def __init__(self, setup: TrainSetup):
        self._setup = setup
        self._calls: collections.deque[tuple[int, Sequence[Batch]]] = collections.deque(
            maxlen=RECENT
        )
        self._program: Callable[[TrainState, Batch], jax.Array] | None = None

    def observe(self, first: int, batches: Sequence[Batch]) -> None:
        """Keep the batches of the call after step `first`; on any thread."""
        self._calls.append((first, batches))

    def helps(self, step: int, state: TrainState) -> bool:
        """Return whether the gradient of a step's batch is finite at the smallest loss scale.

        Compiles a program at the first call. Every process of a run calls this at the same time.

        Args:
            step: the first step of a run is 1.
            state: the newest state, not donated yet.
        """
        batch = self._setup.strategy.place(self._batch(step))
        if self._program is None:
            with HEARTBEAT.during("compile"):
                compiled = self._setup.strategy.compile
                self._program = compiled(_is_finite(self._setup), self._setup.like, batch)
        state = dataclasses.replace(state, step=jnp.full_like(state.step, step - 1))
        return bool(jax.device_get(self._program(state, batch)))

    def _batch(self, step: int) -> Batch:
        return next(
            batches[step - first - 1]
            for first, batches in reversed(self._calls.copy())  # `observe` may append meanwhile
            if first < step <= first + len(batches)
        )


def _is_finite(setup: TrainSetup) -> Callable[[TrainState, Batch], Any]:
    """Return `(state, batch) -> whether the step would be taken at the smallest loss scale`."""
    x, strategy = setup.experiment, setup.strategy
    step = make_step(
        x.loss,
        optax.identity(),
        microbatches=setup.config.microbatches,
        couples=x.couples,
        psum=strategy.psum,
        ragged=x.train.ragged,
        compute=setup.config.precision.compute,
        sharding=strategy.gradient_sharding(setup.like.params, x.dims),
    )

    def is_finite(state: TrainState, batch: Batch) -> Any:
        state, scale = to_device(state, setup.like), state.scale
        assert isinstance(scale, LossScale), "only a gradient that is scaled overflows for it"
        smallest = dataclasses.replace(scale, factor=jnp.full_like(scale.factor, scale.minimum))
        at = dataclasses.replace(state, scale=smallest, opt_state=optax.EmptyState())
        return step(at, batch)[0].skipped == state.skipped

    return is_finite


class BadStepPolicy:
    """Policy for bad steps; a context manager.

    Args:
        directory: of the run, if it has one; only the first process writes there.
        start: the step of the checkpoint that the run resumes from; None for a new run.
        earlier: the bad steps after which the run rolled back.
        known: the result of `about` when the checkpoint was saved.
    """

    def __init__(
        self,
        setup: TrainSetup,
        directory: RunDir | None = None,
        *,
        start: int | None = None,
        earlier: Sequence[int] = (),
        known: Mapping[str, Any] = {},
    ):
        self._setup, self._earlier, self._known = setup, earlier, known
        writes = directory is not None and directory.first
        self.events = BadStepLog(
            directory.events if directory and writes else None,
            resumed_at=start,
        )
        """Log of bad steps."""
        scaled = isinstance(setup.like.scale, LossScale) and not isinstance(
            setup.config.guard, SkipPolicy
        )
        self._overflow = OverflowCheck(setup) if scaled else None
        self._guard: BadStepGuard | None = None
        self._finite: SkippedSteps | None = None
        self._inputs: NonfiniteData | None = None

    def hooks(self, state: TrainState, *, every: int, log: Callable[[str], None]) -> Sequence[Hook]:
        """Return the hooks for the steps after `state`.

        Args:
            every: steps between two warnings, where bad steps are skipped.
            log: takes a line of warning.
        """
        policy, minimum = self._setup.config.guard, getattr(state.scale, "minimum", 0.0)
        if not isinstance(policy, SkipPolicy):
            scaled = {"helps": self._overflow.helps} if self._overflow else {}
            self._guard = BadStepGuard(
                policy,
                minimum=minimum,
                earlier=self._earlier,
                known=self._known,
                skipped=int(state.skipped),
                **scaled,
            )
            return [self._guard]
        config = self._setup.config
        recent = RecentSteps()

        def skipped(bad: BadStep) -> None:
            self.record(bad, "skipped")
            inputs.skipped(bad.step)

        self._finite = SkippedSteps(
            recent=recent,
            log=log,
            log_every=every,
            steps_per_call=config.steps_divisor,
            window=min(policy.window, config.steps),
            most=policy.most,
            within=policy.within,
            minimum=minimum,
            event=skipped,
            cause=lambda: inputs.cause(),
            start=int(state.step),
            skipped=int(state.skipped),
            known=self._known,
        )
        inputs = self._inputs = NonfiniteData(
            every=self._finite.every,
            find=self._not_finite,
            log=log,
            known=self._known.get("bad_inputs", {}),
        )
        return [recent, self._finite, inputs]

    @property
    def saw(self) -> Callable[[int, Sequence[Batch]], None] | None:
        """Function that takes the batches of each call beforehand; None where nothing needs it."""
        return self._overflow and self._overflow.observe

    def _not_finite(self, step: int) -> str:
        """Describe what is not finite in the data of a step; empty if all is finite."""
        found = find_nonfinite(self._setup.train[step - 1])
        if found is None:
            return ""
        rows = step_report(self._setup, step).get("rows")
        row = f"row {rows[found.row]}" if rows else f"row {found.row} of the batch of step {step}"
        return f"{row} of `{found.array}` has {found}"

    @property
    def bad(self) -> BadStep | None:
        """Step that ends the run or rolls it back: no later state is worth saving."""
        return self._guard and self._guard.bad

    def about(self, step: int) -> dict[str, Any]:
        """Return what the checkpoint of a step records: skipped windows, and the guard's state."""
        known = self._guard.means.state() if self._guard else {}
        if self._finite:
            self._finite.catch_up(step)
            known = self._finite.state()
        if self._inputs:
            known = {**known, "bad_inputs": self._inputs.state()}
        return {"without": [list(window) for window in self._setup.windows], "guard": known}

    def ended(self, step: int) -> None:
        """Count the steps up to the last that was taken, and warn of those that were skipped."""
        if self._finite:
            self._finite.catch_up(step)
            self._finite.warn(step)

    def record(self, bad: BadStep, done: Done, **more: Any) -> None:
        """Append a bad step to the log, with the data that it took."""
        self.events.append(bad, done, **step_report(self._setup, bad.step), **more)

    def __enter__(self) -> "BadStepPolicy":
        return self

    def __exit__(self, *_: object) -> None:
        self.events.close()
