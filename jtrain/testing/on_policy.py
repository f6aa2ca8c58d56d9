"""On-policy sampling: a check that a loss learns from the distribution that its sampler drew from.

The loss of `jtrain.finetune.policy_loss` records, for each token, the log probability by which its
sampler drew it, and the one that the loss itself computes. At the parameters that sampled, their
difference is the log ratio, which is 0 unless the two are different programs.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np

from jtrain.core.types import Extra
from jtrain.errors import ConfigError, ShardingError
from jtrain.finetune.lora import extra_of_model
from jtrain.testing.case import build_loss_case
from jtrain.testing.invariant import iter_variants
from jtrain.testing.run_step import Layout, Steps, list_layouts
from jtrain.train.experiment import RunConfig


class LogRatio(NamedTuple):
    """The token of a sample whose log ratio is largest in absolute value."""

    size: float
    """Absolute log ratio; infinite where a log probability is not a number."""
    row: int
    answer: int
    token: int
    """Position in the answer."""
    sampler: float
    """Log probability by which the token was drawn."""
    loss: float
    """Log probability in the loss."""


class OnPolicyReport(NamedTuple):
    """Largest log ratios of a fresh sample."""

    by_split: Mapping[str, LogRatio]
    """By the name of the split."""
    not_compared: tuple[str, ...]
    """Splits that the machine or the model does not allow, with the reason."""

    @property
    def largest(self) -> float:
        """Largest absolute log ratio under any split."""
        return max(found.size for found in self.by_split.values())

    def describe(self) -> str:
        """Return a line for each split."""
        width = max(map(len, self.by_split))
        lines = [f"{name:<{width}}  {found.size:.1e}" for name, found in self.by_split.items()]
        return "\n".join([*lines, *self.not_compared])


def assert_on_policy(
    config: RunConfig,
    strategies: Mapping[str, Layout] | None = None,
    *,
    rows: int = 8,
    tolerance: float = 1e-5,
) -> OnPolicyReport:
    """Raise unless the log ratios of a fresh sample are 0 under every split of the batch.

    One step is taken with each split of `jtrain check`, from the run's first parameters (noise is
    added, so that the terms of LoRA take part), in float32.

    Args:
        config: of a run whose loss is `jtrain.finetune.policy_loss`, such as configs/grpo.yaml:
            `jt.resolve("configs/grpo.yaml", ["policy.top_p=0.8"]).config`.
        strategies: as in `assert_invariant`; by default all that fit the available devices.
        rows: questions of the sample.
        tolerance: largest absolute log ratio.

    Raises:
        AssertionError: if a log ratio is larger; the message has the split, the token and both log
            probabilities.
        ConfigError: if the loss of the config does not sample.
    """
    case = build_loss_case(config, rows)
    if _find_rollouts(case.extra) is None:
        raise ConfigError(
            f"experiment {config.experiment}: its loss does not sample, so there are no log "
            f"probabilities to compare. Give the config of a run whose loss is "
            f"jtrain.finetune.policy_loss, such as configs/grpo.yaml."
        )
    chosen = list_layouts(case.rows, case.dims) if strategies is None else strategies
    by_split, not_compared = {}, []
    for step in iter_variants(Steps(case), chosen, not_compared):
        name = "one device" if step.name == "state given up" else step.name
        try:
            by_split[name] = _largest(_find_rollouts(step.actual.state["extra"]))
        except (ShardingError, ConfigError) as error:
            not_compared.append(f"{name} was not compared: {str(error).split('. ')[0]}.")
    if not by_split:
        raise ConfigError("\n".join(["no split was compared:", *not_compared]))
    report = OnPolicyReport(by_split, tuple(not_compared))
    name, worst = max(by_split.items(), key=lambda pair: pair[1].size)
    if not worst.size <= tolerance:
        raise AssertionError(
            f"the loss does not learn from the distribution that was sampled: under {name} the "
            f"sampler drew token {worst.token} of answer {worst.answer} to question {worst.row} "
            f"with log probability {worst.sampler:.6g}, and the loss gives it {worst.loss:.6g}: "
            f"a log ratio of {worst.size:.1e}, above {tolerance:.1e}. Apply the same temperature, "
            f"top_k and top_p in both, and the same parameters.\n{report.describe()}"
        )
    return report


def _find_rollouts(extra: Extra) -> Any:
    """Return the record of `policy_loss` in the `extra` of a state, under LoRA too, or None."""
    own = extra_of_model(extra)
    rollouts = own.get("rollouts") if isinstance(own, Mapping) else None
    return rollouts if rollouts and "sampler_log_probs" in rollouts else None


def _largest(rollouts: Any) -> LogRatio:
    names = "sampler_log_probs", "log_probs"
    sampler, loss = (np.asarray(rollouts[name], np.float64) for name in names)
    sizes = np.abs(loss - sampler)
    sizes = np.where(np.isnan(sizes), np.inf, sizes)
    row, answer, token = map(int, np.unravel_index(sizes.argmax(), sizes.shape))
    at = (row, answer, token)
    return LogRatio(float(sizes[at]), *at, float(sampler[at]), float(loss[at]))
