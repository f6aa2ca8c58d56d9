"""What a run does about bad steps: the hooks that the config's `guard` stands for, and the file."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from jtrain.assemble import Assembly
from jtrain.bad_step import taken
from jtrain.config.guard import Skip
from jtrain.data.not_finite import first_not_finite
from jtrain.directory import Directory
from jtrain.hooks.bad_inputs import BadInputs
from jtrain.hooks.events import Bad, Done, Events
from jtrain.hooks.finite import Finite
from jtrain.hooks.guard import Guard
from jtrain.hooks.recent import Recent
from jtrain.loop import Hook
from jtrain.state import TrainState


class Guarded:
    """Use it in a `with` block.

    Args:
        directory: of the run, if it has one; of several processes the first writes there.
        start: the step of the checkpoint that the run goes on from; None at its beginning.
        earlier: the bad steps for which it went back.
        known: what `about` gave when the checkpoint was saved.
    """

    def __init__(
        self,
        parts: Assembly,
        directory: Directory | None = None,
        *,
        start: int | None = None,
        earlier: Sequence[int] = (),
        known: Mapping[str, Any] = {},
    ):
        self._parts, self._earlier, self._known = parts, earlier, known
        writes = directory is not None and directory.first
        self._events = Events(directory.events if directory and writes else None, resumed_at=start)
        self._guard: Guard | None = None

    def hooks(
        self, state: TrainState, *, every: int, tell: Callable[[str], None]
    ) -> Sequence[Hook]:
        """Those that see the steps after `state`.

        Args:
            every: steps between two looks at what was skipped, where bad steps are skipped.
            tell: takes a line of warning.
        """
        policy, minimum = self._parts.config.guard, getattr(state.scale, "minimum", 0.0)
        if not isinstance(policy, Skip):
            self._guard = Guard(
                policy,
                minimum=minimum,
                earlier=self._earlier,
                known=self._known,
                skipped=int(state.skipped),
            )
            return [self._guard]
        recent = Recent(every=self._parts.config.steps_per_call)
        inputs = BadInputs(
            every=every,
            find=self._not_finite,
            tell=tell,
            start=int(state.step),
        )

        def skipped(bad: Bad) -> None:
            self.wrote(bad, "skipped")
            inputs.skipped(bad.step)

        finite = Finite(
            every=every,
            tell=tell,
            start=int(state.step),
            skipped=int(state.skipped),
            minimum=minimum,
            most=policy.most,
            within=policy.within,
            recent=recent,
            event=skipped,
            cause=inputs.cause,
        )
        return [recent, finite, inputs]

    def _not_finite(self, step: int) -> str:
        """What is not finite in the data that a step took, in words; empty if all is."""
        found = first_not_finite(self._parts.train[step - 1])
        if found is None:
            return ""
        rows = taken(self._parts, step).get("rows")
        row = f"row {rows[found.row]}" if rows else f"row {found.row} of the batch of step {step}"
        return f"{row} of `{found.array}` has {found}"

    @property
    def bad(self) -> Bad | None:
        """The step that ends the run, or sends it back: nothing after it is worth keeping."""
        return self._guard and self._guard.bad

    def about(self) -> dict[str, Any]:
        """What a checkpoint keeps: the windows that are left out, and what the guard knows."""
        known = self._guard.means.state() if self._guard else {}
        return {"without": [list(window) for window in self._parts.windows], "guard": known}

    def wrote(self, bad: Bad, done: Done, **more: Any) -> None:
        """Has a bad step on the disk, with the data that it took."""
        self._events.append(bad, done, **taken(self._parts, bad.step), **more)

    def __enter__(self) -> "Guarded":
        return self

    def __exit__(self, *_: object) -> None:
        self._events.close()
