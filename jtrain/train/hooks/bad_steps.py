"""Bad steps: the guard that ends the loop at one, their log, and the data that caused them."""

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

from jtrain.config.sections import RollbackPolicy, StopPolicy
from jtrain.core.loop import Hook, Rollback, Stop
from jtrain.core.types import Metrics
from jtrain.errors import CheckpointError
from jtrain.io import jsonl
from jtrain.io.jsonl import JsonlWriter

Done = Literal["skipped", "rolled back", "stopped"]


class BadStep(NamedTuple):
    """A step that was not finite, or a spike."""

    step: int  # the first is 1
    what: str  # `loss nan, gradient norm inf`
    loss: float
    grad_norm: float
    update_norm: float = 0.0  # nothing is added by a step that is skipped

    @property
    def is_only_update(self) -> bool:
        """True if loss and gradient were finite and the optimizer's update was not."""
        return math.isfinite(self.loss + self.grad_norm) and not math.isfinite(self.update_norm)


@dataclasses.dataclass
class RunningMean:
    """Means over roughly the last `memory` steps: weights decay by `1 - 1/memory` a step.

    Only finite numbers are included. The weights add up to 1 from the first step on.
    """

    memory: int
    steps: int = 0
    loss: float = 0.0
    grad_norm: float = 0.0

    def absorb(self, loss: float, grad_norm: float) -> None:
        """Update the means by a step; a step that is not finite changes nothing."""
        if math.isfinite(loss) and math.isfinite(grad_norm):
            self.steps += 1
            share = max(1 / self.steps, 1 / self.memory)
            self.loss += share * (loss - self.loss)
            self.grad_norm += share * (grad_norm - self.grad_norm)

    def above(self, name: str, value: float, factor: float) -> bool:
        """Return whether a loss or norm is more than `factor` times its mean; 0 is no bound.

        With a mean below zero: whether it exceeds the mean by `factor - 1` times its size.
        """
        mean = getattr(self, name)
        known = factor > 0 and self.steps >= self.memory
        return known and value - mean > (factor - 1) * abs(mean)

    def state(self) -> dict[str, Any]:
        """Return JSON from which `restore` recovers the same means, to the bit."""
        state = dataclasses.asdict(self)
        del state["memory"]
        return state

    def restore(self, state: Mapping[str, Any]) -> None:
        """Set the means to a saved state; an empty one restarts them."""
        self.steps = state.get("steps", 0)
        self.loss, self.grad_norm = state.get("loss", 0.0), state.get("grad_norm", 0.0)


class BadStepGuard(Hook):
    """Hook that returns a `Rollback` or a `Stop` at a bad step.

    The numbers of a step arrive some calls late, but all numbers up to a checkpoint arrive before
    the checkpoint is written, so no checkpoint is later than a bad step. In several processes the
    numbers are those of the whole batch and equal to the bit, so all processes decide alike.

    Args:
        policy: of the config.
        minimum: smallest loss scale, if there is one. Above it an overflow of the gradient is how
            the scale adapts, and is not bad.
        helps: `(step, state) -> bool`, with a state that is not donated yet: whether the gradient
            of that step's batch is finite at the smallest loss scale. If not, no scale helps.
        earlier: the bad steps that the run was rolled back for before.
        known: the result of `RunningMean.state` in the checkpoint.
        skipped: steps that were skipped before the first step of this run (`state.skipped`).
    """

    def __init__(
        self,
        policy: RollbackPolicy | StopPolicy,
        *,
        minimum: float = 0.0,
        helps: Callable[[int, Any], bool] = lambda step, state: True,
        earlier: Sequence[int] = (),
        known: Mapping[str, Any] = {},
        skipped: int = 0,
    ):
        self._policy, self._minimum, self._earlier = policy, minimum, earlier
        self._helps, self._state = helps, None
        self.means = RunningMean(policy.spike.memory)
        """Running means over the good steps."""
        self.means.restore(known)
        self._skipped = skipped
        self.bad: BadStep | None = None
        """The first bad step; no later state is worth saving."""

    def on_numbers(self, step: int, numbers: Mapping[str, float]) -> Stop | None:
        """Check a step; a bad one ends the loop."""
        loss, grad_norm, update_norm = (
            numbers[name] for name in ("loss", "grad_norm", "update_norm")
        )
        before, self._skipped = self._skipped, round(numbers.get("skipped", self._skipped))
        skipped = self._skipped > before or not math.isfinite(loss + grad_norm)
        overflow = math.isfinite(loss) and not math.isfinite(grad_norm)
        scaled = skipped and overflow and numbers.get("loss_scale", 0.0) > self._minimum
        if self.bad or (scaled and self._helps(step, self._state)):
            return None
        what = self._describe(loss, grad_norm, update_norm)
        if skipped and math.isfinite(loss + grad_norm):
            what = describe_skipped_step(loss, grad_norm)
        if scaled:
            what += ", at the smallest loss scale too"
        if not what:
            self.means.absorb(loss, grad_norm)
            return None
        self.bad = BadStep(step, what, loss, grad_norm, update_norm)
        return self._respond(self.bad)

    def on_state(self, step: int, state: Any, metrics: Metrics) -> None:
        """Keep the newest state until it is donated; `on_numbers` is called before that."""
        self._state = state

    def _describe(self, loss: float, grad_norm: float, update_norm: float) -> str:
        """Return what is wrong with a step, in words; "" for a good step."""
        spike, means = self._policy.spike, self.means
        if not all(map(math.isfinite, (loss, grad_norm, update_norm))):
            update = f", update norm {update_norm:g}" if math.isfinite(grad_norm) else ""
            return f"is not finite: loss {loss:.4g}, gradient norm {grad_norm:.4g}{update}"
        if means.above("loss", loss, spike.loss):
            return f"is a spike: loss {loss:.4g}, and the mean before it {means.loss:.4g}"
        if means.above("grad_norm", grad_norm, spike.grad_norm):
            return (
                f"is a spike: gradient norm {grad_norm:.4g}, and the mean before it "
                f"{means.grad_norm:.4g}"
            )
        return ""

    def _respond(self, bad: BadStep) -> Stop:
        policy, why = self._policy, f"step {bad.step} {bad.what}."
        if isinstance(policy, StopPolicy):
            return Stop(why, "failed")
        recent = [step for step in self._earlier if step > bad.step - policy.within]
        if len(recent) < policy.most:
            return Rollback(why, step=bad.step, back=policy.back, skip=policy.skip)
        steps = ", ".join(map(str, recent))
        return Stop(
            f"{why} The run was rolled back {len(recent)} times within {policy.within} steps (for "
            f"{steps or 'none'}), and guard.most is {policy.most}.",
            "failed",
        )


def describe_skipped_step(loss: float, grad_norm: float) -> str:
    """Return a description of a skipped step, by its loss and gradient norm."""
    if math.isfinite(loss + grad_norm):
        return f"makes extra non-finite: loss {loss:.4g}"
    return f"is not finite: loss {loss:.4g}, gradient norm {grad_norm:.4g}"


class RollbackDecision(NamedTuple):
    """Decision to skip some batches from now on, and roll back to before them."""

    step: int  # the bad step
    window: tuple[int, int]


class BadStepLog:
    """Writer of one line for each event: `{"step": 12, "done": "rolled back", "batch": 11, ...}`.

    Events after the checkpoint that a run resumes from are cut off, since the run repeats those
    steps. A rollback decision stays, because the resumed run depends on it.

    Args:
        path: the file, created at the first event; None to write none.
        resumed_at: as `JsonlWriter` takes it.
    """

    def __init__(
        self,
        path: Path | None,
        *,
        resumed_at: int | None = None,
    ):
        self._path, self._resumed_at = path, resumed_at
        self.rows: JsonlWriter | None = None
        """The file; None before the first event."""
        if path is not None and path.exists():
            self._open(path)

    def append(self, bad: BadStep, done: Done, **more: Any) -> None:
        """Write an event and flush it to the disk."""
        if self._path is not None:
            rows = self.rows or self._open(self._path)
            rows.append({**bad._asdict(), "done": done, **more})
            rows.sync()

    def close(self) -> None:
        """Close the file."""
        if self.rows is not None:
            self.rows.close()

    def _open(self, path: Path) -> JsonlWriter:
        rows = JsonlWriter(path, resumed_at=self._resumed_at, retain=_is_decision)
        self.rows = rows
        return rows


def read_decisions(path: Path) -> Sequence[RollbackDecision]:
    """Return the rollback decisions of a run, in order.

    Raises:
        CheckpointError: if one cannot be read; without it the run would train on other batches.
    """
    return [_decision(path, row) for row in jsonl.complete_rows(path) if _is_decision(row)]


def _decision(path: Path, row: Mapping[str, Any]) -> RollbackDecision:
    match row:
        case {"step": int(step), "without": [int(first), int(stop)]}:
            return RollbackDecision(step, (first, stop))
    raise CheckpointError(
        f"{path} has a row of step {row['step']} about a rollback that does not say which "
        f'batches were skipped: its "without": [first, stop] is missing. Put the file back as it '
        f"was, or start a new run (name=...)."
    )


def _is_decision(row: Mapping[str, Any]) -> bool:
    return row.get("done") == "rolled back"


SHARE = 0.1  # of all steps, that may be skipped for such rows
MIN_STEPS, MAX_NAMED = 5, 3  # steps before the run may end; rows that are named


class NonfiniteData(Hook):
    """Hook that names rows that are not finite, and stops a run if they cost a tenth of its steps.

    In a large data set such a row costs one step of an epoch, and is named. In a small data set it
    would keep a large share of the batches out of training.

    Args:
        every: steps between two checks; independent of the logging, since it decides where a run
            ends.
        find: describes what is not finite in the data of a step (the first is 1), and where; ""
            if all is finite.
        log: takes a line of warning.
        known: the result of `state` in the checkpoint.
    """

    last = True

    def __init__(
        self,
        *,
        every: int,
        find: Callable[[int], str],
        log: Callable[[str], None],
        known: Mapping[str, Any] = {},
    ):
        self.every, self._find, self._log = every, find, log
        self._steps: int = known.get("steps", 0)
        self._named = dict.fromkeys(known.get("named", ()))
        self._cause: str = known.get("cause", "")

    def skipped(self, step: int) -> None:
        """Look for values that are not finite in the batch of a skipped step."""
        self._cause = self._find(step)
        if not self._cause:
            return
        self._steps += 1
        if self._cause not in self._named and len(self._named) < MAX_NAMED:
            self._named[self._cause] = None
            self._log(f"step {step} was skipped: {self._cause}. {self._advice()}")

    def cause(self) -> str:
        """Return why the last skipped step was skipped, if its batch is the cause; else ""."""
        return self._cause

    def state(self) -> dict[str, Any]:
        """Return JSON that another instance can resume from."""
        return {"steps": self._steps, "named": list(self._named), "cause": self._cause}

    def on_numbers(self, step: int, numbers: Mapping[str, float]) -> Stop | None:
        """Stop the run if such rows cost too many steps."""
        del numbers
        if self._steps < max(MIN_STEPS, SHARE * step):
            return None
        return Stop(
            f"{self._steps} of {step} steps were skipped because the data is not finite: "
            f"{', '.join(self._named)}. {self._advice()}",
            "failed",
        )

    def _advice(self) -> str:
        array = self._cause.partition("`")[2].partition("`")[0]
        return f"Remove such rows, or fill them: {array} = np.nan_to_num({array})."
