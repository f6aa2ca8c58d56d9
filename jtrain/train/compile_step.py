"""Compilation of the step, while the first state is made and the first batches are checked."""

from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor

from jtrain.core.state import TrainState
from jtrain.core.step import StepFn
from jtrain.distributed.heartbeat import HEARTBEAT
from jtrain.train.first_batch.first_batch import FirstBatch
from jtrain.train.first_batch.set_checks import check_batches, trace_set_batches, trace_train_batch
from jtrain.train.setup import TrainSetup


def compile_step(
    setup: TrainSetup, make_state: Callable[[], TrainState], start: int | None = None
) -> tuple[StepFn, TrainState]:
    """Return the compiled step, and the state that `make_state` makes during compilation.

    Args:
        start: the step that the run resumes from, whose batch is checked.

    Raises:
        UserError: for what is wrong with the loss, or with the first batch that it gets.
    """
    # Traced in this thread, where a caller's `with jax...` holds.
    train_batches = trace_train_batch(setup, start or 0)
    with ThreadPoolExecutor(1) as beside:
        state, checked = beside.submit(make_state), beside.submit(setup.check_evaluation)
        batches = beside.submit(_batches_to_check, setup, train_batches)
        # Two programs that XLA:CPU compiles at a time take twice as long as one after the other. A
        # checkpoint is read beside, for nothing of it is compiled.
        one_by_one = start is None and setup.devices[0].platform == "cpu"
        with HEARTBEAT.during("compile"):
            step = setup.compile_step(then=lambda: _wait_for(state) if one_by_one else None)
        made = _wait_for(state)
        checked.result()
        check_batches(setup, batches.result(), made)
        setup.first.forget()
        return step, made


def _wait_for(state: Future[TrainState]) -> TrainState:
    with HEARTBEAT.during("restore"):
        return state.result()


def _batches_to_check(setup: TrainSetup, train_batches: Sequence[FirstBatch]) -> list[FirstBatch]:
    """Return the first batches, those of the evaluation sets too, with what is suspect in them."""
    batches = [*train_batches, *trace_set_batches(setup)]
    return [batch for batch in batches if (batch.suspects, batch.outside) is not None]
