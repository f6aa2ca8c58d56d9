"""A published defect in splitting batches, reproduced as a formula: its size, what a check says.

`jtrain museum` shows these. All share one small problem: tokens in rows of different lengths are
classified by a parameter `body` below a parameter `head`.
"""

import dataclasses
import functools
import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Literal, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Array, Bool, Float, Int

from jtrain.core.loss import normalize_loss
from jtrain.core.mean import Mean
from jtrain.core.rows import with_rows
from jtrain.core.types import Batch, Key, Params
from jtrain.parallel import Mirrored
from jtrain.testing.case import Loss, LossCase, MakeStep, PlacedLoss, build_case
from jtrain.testing.compare import StepResult, distance, relative_difference
from jtrain.testing.invariant import check, compare_variant, iter_variants
from jtrain.testing.loss_checks import compare_loss
from jtrain.testing.report import CheckReport, Comparison
from jtrain.testing.run_step import Layout, Steps, StepVariant, build_strategy

ROWS, TIME, WIDTH, HIDDEN, CLASSES = 8, 4, 3, 5, 4
LENGTHS = (3, 1, 4, 2, 4, 1, 2, 3)  # tokens of each row that count
DIMS = {"body": ("width", None), "head": (None, "vocab")}
MICROBATCHES, DEVICES = 2, Mirrored(devices=2, impl="shard_map")
SGD = optax.sgd(0.1)

Part: TypeAlias = tuple[tuple[Any, Params], Any]
"""The loss and its gradient, summed over the tokens of a microbatch on a device; their number."""
Rule: TypeAlias = Callable[[Sequence[Part], Callable[[Any], Any]], tuple[Any, Any]]
"""`rule(parts, psum)` returns the reported loss and the gradient for the optimizer.

A list of gradients calls the optimizer for each of them.
"""


def make_batch(lengths: Sequence[int], weight: float) -> dict[str, np.ndarray]:
    """Return rows of tokens, of which the first `lengths` of each row count, `weight` times."""
    draw = np.random.default_rng(0)
    return {
        "x": draw.normal(size=(ROWS, TIME, WIDTH)).astype(np.float32),
        "label": draw.integers(0, CLASSES, (ROWS, TIME)).astype(np.int32),
        "length": np.asarray(lengths, np.int32),
        "weight": np.full((ROWS, TIME), weight, np.float32),
    }


def make_params() -> dict[str, np.ndarray]:
    """Return the parameters, drawn from a normal distribution."""
    draw = np.random.default_rng(1)
    shapes = {"body": (WIDTH, HIDDEN), "head": (HIDDEN, CLASSES)}
    return {name: draw.normal(size=shape).astype(np.float32) for name, shape in shapes.items()}


def hidden(params: Params, batch: Batch) -> Float[Array, "b t f"]:
    """Return the activations below the head."""
    return jnp.tanh(batch["x"] @ params["body"])


def nats(logits: Float[Array, "b t c"], label: Int[Array, "b t"]) -> Float[Array, "b t"]:
    """Return the cross entropy of each token."""
    return -jnp.take_along_axis(jax.nn.log_softmax(logits), label[..., None], 2)[..., 0]


def answered(batch: Batch) -> Bool[Array, "b t"]:
    """Return the tokens within the length of their row, in hidden rows too."""
    return jnp.arange(TIME)[None] < batch["length"][:, None]


def counted(batch: Batch) -> Bool[Array, "b t"]:
    """Return the tokens that count: within the length of their row, of rows that are not hidden."""
    return answered(batch) & batch["mask"][:, None]


def right_loss(params: Params, batch: Batch, rng: Key | None) -> Mean:
    """Return the sum over the tokens that count, and their number: the step divides once."""
    values = nats(hidden(params, batch) @ params["head"], batch["label"])
    return Mean.of(values, counted(batch), batch["weight"])


def add(parts: Sequence[Any]) -> Any:
    """Add the trees of all parts."""
    return jax.tree.map(lambda *leaves: sum(leaves), *parts)


def over(sums: Any, number: Any) -> Any:
    """Divide each leaf of a tree by a number."""
    return jax.tree.map(lambda leaf: leaf / number, sums)


def right_rule(parts: Sequence[Part], psum: Callable[[Any], Any]) -> tuple[Any, Any]:
    """Sum loss, gradient and tokens over all microbatches and devices, and divide once."""
    sums, tokens = psum(add(parts))
    return over(sums, tokens)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Exhibit:
    """A public defect: a rule that combines the parts of a batch, or a loss, with its thread."""

    name: str
    what: str
    """What was done, and what came out, in a sentence."""
    thread: str
    """Address of the public report."""
    status: str
    """`open` or `fixed`, with a date."""
    cause: str
    """The cause that a check names."""
    rule: Rule | None = None
    loss: Loss | PlacedLoss = right_loss
    error_of: Literal["gradient", "loss", "update"] = "gradient"
    """What is compared; `loss`: the reported value is wrong, and the gradient is right."""
    lengths: tuple[int, ...] = LENGTHS
    weight: float = 1.0  # of each token
    optimizer: optax.GradientTransformation = SGD
    devices: Layout = DEVICES

    def measure(self) -> tuple[float, float]:
        """Return the relative errors of the defect and of jtrain, for 2 microbatches x 2 devices.

        Both are compared with one device that takes the whole batch by the right loss. An error is
        infinite where a number is not finite.
        """
        right = _right_steps(self.lengths, self.weight, self.optimizer)
        wrong = self._steps().actual(_split(self.devices))
        return self._error(wrong, right), self._error(_right_split(right, self.devices), right)

    def diagnose(self) -> Comparison:
        """Return the first comparison that fails: of the loss, 2 microbatches or 2 devices."""
        return next(row for row in self._comparisons() if row.verdict == "FAILS")

    def check(self) -> CheckReport:
        """Return the whole report of a check."""
        return check(self._steps().case, {"2 devices": self.devices})

    def sources(self) -> tuple[str, str]:
        """Return the source of the formula and that of the right one."""
        loss = self.loss.build if isinstance(self.loss, PlacedLoss) else self.loss
        pair: tuple[Any, Any] = (self.rule, right_rule) if self.rule else (loss, right_loss)
        wrong, right = (inspect.getsource(function).rstrip() for function in pair)
        return wrong, right

    def _comparisons(self) -> Iterator[Comparison]:
        steps = self._steps()
        if self.rule is None and not isinstance(self.loss, PlacedLoss):
            yield from compare_loss(steps.case)
        for variant in iter_variants(steps, {"2 devices": self.devices}, []):
            if variant.name in {"2 microbatches", "2 devices"}:
                yield compare_variant(variant)

    def _steps(self) -> Steps:
        """Return the steps of the defect."""
        if self.rule is None:
            return Steps(_case(self.loss, self.lengths, self.weight, self.optimizer))
        right = _right_steps(self.lengths, self.weight, self.optimizer)
        return Steps(dataclasses.replace(right.case, make=make_rule_step(self.rule)), like=right)

    def _error(self, actual: StepResult, right: Steps) -> float:
        expected = right.expected(StepVariant())
        if self.error_of == "loss":
            return relative_difference(actual.loss, expected.loss)
        if self.error_of == "gradient":
            return distance(actual.gradient, expected.gradient).by
        updates = [
            jax.tree.map(np.subtract, result.state["params"], right.case.params)
            for result in (actual, expected)
        ]
        return distance(*updates).by


def _case(
    loss: Loss | PlacedLoss,
    lengths: tuple[int, ...],
    weight: float,
    optimizer: optax.GradientTransformation,
) -> LossCase:
    batch = make_batch(lengths, weight)
    return build_case(loss, make_params(), batch, optimizer=optimizer, dims=DIMS)


@functools.cache  # most exhibits share the steps of one device
def _right_steps(
    lengths: tuple[int, ...], weight: float, optimizer: optax.GradientTransformation
) -> Steps:
    return Steps(_case(right_loss, lengths, weight, optimizer))


@functools.cache
def _right_split(right: Steps, devices: Layout) -> StepResult:
    return right.actual(_split(devices))


def _split(devices: Layout) -> StepVariant:
    return StepVariant(build_strategy(devices), MICROBATCHES, donate=False)


def make_rule_step(rule: Rule) -> MakeStep:
    """Return a function like `jtrain.make_step` whose step combines its parts by a rule."""

    def make(
        loss: Loss,
        optimizer: optax.GradientTransformation,
        *,
        microbatches: int = 1,
        psum: Callable[[Any], Any] | None = None,
        ragged: bool = False,
        **unused: object,
    ):
        del unused
        terms = normalize_loss(loss, ragged=ragged)

        def step(state: Any, batch: Batch) -> tuple[Any, Mapping[str, Mean]]:
            def sums(params: Params, part: Batch) -> tuple[Any, Any]:
                output = terms(params, state.extra, part, state.step_key()).terms
                (mean,), (coefficient,) = output.means, output.coefficients
                return coefficient * mean.total, mean.weight

            rows, parts = with_rows(batch), []
            for i in range(microbatches):
                part = {name: array[i::microbatches] for name, array in rows.items()}
                value = jax.value_and_grad(sums, has_aux=True)(state.params, part)
                (total, tokens), gradient = value
                parts.append(((total, gradient), tokens))
            loss, gradients = rule(parts, psum or (lambda tree: tree))
            params, opt_state = state.params, state.opt_state
            for gradient in gradients if isinstance(gradients, list) else [gradients]:
                updates, opt_state = optimizer.update(gradient, opt_state, params)
                params = optax.apply_updates(params, updates)
            state = dataclasses.replace(
                state, step=state.step + 1, params=params, opt_state=opt_state
            )
            return state, {"loss": Mean(loss, jnp.float32(1))}

        return step

    return make
