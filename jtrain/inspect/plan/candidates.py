"""Candidates of a search: layouts, microbatches and recomputation, with analytic costs."""

import dataclasses
import functools
import math
from collections.abc import Iterator
from typing import Any, NamedTuple

from jtrain.core.pytree import named_leaves
from jtrain.inspect.plan.cpu_speeds import cpu_speeds
from jtrain.inspect.plan.overlap import PlacedCollective
from jtrain.inspect.plan.roofline import chip_speeds
from jtrain.inspect.plan.schedule import Speeds
from jtrain.inspect.plan.topology import Topology
from jtrain.parallel import Auto, Axes, MemoryNeeds
from jtrain.parallel.chips import find_chip
from jtrain.parallel.rules import AXES
from jtrain.parallel.strategies.auto import MemoryEstimate, estimate
from jtrain.train.auto_layout import trace_memory_needs
from jtrain.train.experiment import RunConfig
from jtrain.train.setup import set_up
from jtrain.train.summary import bound_step_flops

# From the least memory to the least computation.
REMAT: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("full", ()),
    ("names", ("qkv", "attention")),
    ("names", ("qkv", "attention", "hidden")),
    ("dots_with_no_batch_dims", ()),
    ("dots", ()),
    ("none", ()),
)
MICROBATCHES = (1, 2, 4)


class Candidate(NamedTuple):
    """Values of a config that a search changes."""

    parallel: Any
    microbatches: int
    remat: str = ""  # empty: the model has no such field
    saved: tuple[str, ...] = ()

    def apply(self, config: RunConfig) -> RunConfig:
        """Return the config with these values.

        Raises:
            UserError: if they conflict.
        """
        values: dict[str, Any] = {"parallel": self.parallel, "microbatches": self.microbatches}
        model: Any = getattr(config, "model", None)
        if self.remat:
            model = dataclasses.replace(model, remat=self.remat, saved=self.saved)
            values["model"] = model
        return dataclasses.replace(config, **values)

    def describe(self) -> str:
        """Return the values as they are typed after `jtrain run CONFIG`."""
        words = [describe_layout(self.parallel), f"microbatches={self.microbatches}"]
        if self.remat:
            words.append(f"model.remat={self.remat}")
        if self.saved:
            words.append(f"model.saved=[{','.join(self.saved)}]")
        return " ".join(words)


def describe_layout(parallel: Any) -> str:
    """Return a layout as one setting: `parallel={kind: sharded, fsdp: 4, tensor: 4}`."""
    plain = type(parallel)()
    values = {
        field.name: value
        for field in dataclasses.fields(parallel)
        if (value := getattr(parallel, field.name)) != getattr(plain, field.name)
    }
    words = [f"kind: {parallel.kind}"]
    for name, value in values.items():
        text = str(value).lower() if isinstance(value, bool) else str(value)
        text = f"[{', '.join(value)}]" if isinstance(value, tuple) else text
        words.append(f"{name}: {text}")
    return f"'parallel={{{', '.join(words)}}}'"


def current(config: RunConfig) -> Candidate:
    """Return the candidate that changes nothing."""
    model: Any = getattr(config, "model", None)
    saved = tuple(getattr(model, "saved", ()))
    return Candidate(config.parallel, config.microbatches, getattr(model, "remat", ""), saved)


@dataclasses.dataclass(eq=False)
class Costs:
    """Analytic costs of the candidates of a config, from shapes alone."""

    config: RunConfig
    topology: Topology

    def memory(self, candidate: Candidate) -> int:
        """Return the estimated bytes on a device."""
        return self._estimate(candidate).total

    def seconds(self, candidate: Candidate) -> float:
        """Return the estimated time of a step; only for an order of candidates."""
        layout, needs, speeds = self._axes(candidate), self.needs(candidate), self._speeds
        sizes = {axis: getattr(layout, axis) for axis in AXES}
        rows, inside = sizes["data"] * sizes["fsdp"] * sizes["expert"], layout.tensor
        turns, rate = candidate.microbatches, self._rate(layout)
        params = sum(x.size for x in named_leaves(needs.state.params).values())
        weights = 2 * params // (inside * sizes["expert"] * sizes["stage"])
        gathers = 3 * turns if layout.zero == 3 else 1 + (turns if layout.zero == 2 else 1)
        split = layout.fsdp * layout.data * layout.slice
        gathered = (
            gathers * weights * (split - 1) / split / rate("fsdp" if layout.fsdp > 1 else "data")
        )
        # Under full recomputation only the inputs of blocks are saved, once for each block.
        inputs = self.needs(candidate._replace(remat="full" if candidate.remat else "", saved=()))
        local = turns * inputs.saved / (rows * layout.context * layout.slice)
        again = 4 if candidate.remat == "full" else 0
        tensor = (8 + again) * local * (inside - 1) / inside**2 / rate("tensor")
        context = 8 * local * (layout.context - 1) / layout.context / rate("context")
        expert = 8 * local * (layout.expert - 1) / layout.expert / rate("expert")
        flops = self._flops(candidate.remat, candidate.saved)
        compute = flops / len(self.topology.devices) / speeds.flops
        size = self._estimate(candidate)
        memory = (3 * size.state + 4 * turns * size.saved + 3 * turns * weights) / speeds.memory
        offloaded = 2 * 4 * params // math.prod(sizes.values())  # two moments, there and back
        host = 2 * offloaded / speeds.host if layout.offload else 0.0
        return max(compute, gathered) + tensor + context + expert + memory + host

    @functools.cache  # noqa: B019 - an instance lives as long as its search
    def _estimate(self, candidate: Candidate) -> MemoryEstimate:
        return estimate(self._axes(candidate), self.needs(candidate))

    def needs(self, candidate: Candidate) -> MemoryNeeds:
        """Return the memory needs of a step with the candidate's microbatches and remat."""
        needs = self._traced(candidate.remat, candidate.saved)
        share = needs.microbatches / candidate.microbatches
        return needs._replace(
            rows=int(needs.rows * share),
            microbatches=candidate.microbatches,
            saved=int(needs.saved * share),
            passing=int(needs.passing * share),
        )

    @functools.cache  # noqa: B019 - an instance lives as long as its search
    def _traced(self, remat: str, saved: tuple[str, ...]) -> MemoryNeeds:
        one = Candidate(self.config.parallel, self.config.microbatches, remat, saved)
        return trace_memory_needs(one.apply(self.config), Axes(), self.topology.devices[:1])

    @functools.cache  # noqa: B019
    def _flops(self, remat: str, saved: tuple[str, ...]) -> float:
        single = Axes(fsdp=1)
        one = Candidate(single, self.config.microbatches, remat, saved).apply(self.config)
        bound = bound_step_flops(set_up(one, among=self.topology.devices[:1]))
        return bound.flops.hardware or 0.0

    @functools.cache  # noqa: B019
    def _axes(self, candidate: Candidate) -> Axes:
        if isinstance(candidate.parallel, Axes) and 0 not in map(
            candidate.parallel.__getattribute__, AXES
        ):
            return candidate.parallel
        strategy = candidate.parallel.build(self.topology.devices)
        leaves = getattr(strategy, "leaves", None)
        zero, size = (leaves.zero, leaves.min_size) if leaves else (0, 0)
        offload = getattr(candidate.parallel, "offload", ())
        sizes: dict[str, Any] = {"fsdp": 1, **strategy.axes}
        return Axes(**sizes, zero=zero, min_size=size, offload=offload)

    @functools.cached_property
    def _speeds(self) -> Speeds:
        return self._speeds_of({"all": len(self.topology.devices)})

    def _speeds_of(self, sizes: dict[str, int]) -> Speeds:
        devices, chip = self.topology.devices, find_chip(self.topology.devices)
        if chip is None or not chip.memory:
            return cpu_speeds(len(devices))
        return chip_speeds(chip, sizes, devices)

    def _rate(self, layout: Axes) -> Any:
        if self.topology.devices[0].platform == "cpu":
            return lambda axis: self._speeds.memory / 2
        sizes = {axis: getattr(layout, axis) for axis in AXES}
        speeds = self._speeds_of(sizes)
        together = ("slice",) if layout.slice > 1 else ()

        def rate(axis: str) -> float:
            axes = (*together, axis) if axis in ("fsdp", "data") else (axis,)
            axes = tuple(each for each in axes if sizes[each] > 1)
            if not axes:
                return speeds.memory
            return speeds.link(PlacedCollective("", "all-gather", axes, 0, ""))

        return rate


def candidates(config: RunConfig, topology: Topology, costs: Costs) -> Iterator[Candidate]:
    """Yield the candidates whose rows divide into the devices and microbatches."""
    model: Any = getattr(config, "model", None)
    remats = REMAT if hasattr(model, "remat") and hasattr(model, "saved") else (("", ()),)
    for turns in sorted({config.microbatches, *MICROBATCHES}):
        if config.batch % turns:
            continue
        here = current(config)._replace(microbatches=turns)
        for layout in Auto().layouts(topology.devices, costs.needs(here)):
            if layout.offload and topology.devices[0].platform == "gpu":
                continue  # the description of an absent GPU has no memory of a host
            fixed = dataclasses.replace(layout, **_used_devices(config))
            for remat, saved in remats:
                yield Candidate(fixed, turns, remat, saved)


def _used_devices(config: RunConfig) -> dict[str, Any]:
    timeout = getattr(config.parallel, "start_timeout", None)
    return {} if timeout is None else {"start_timeout": timeout}
