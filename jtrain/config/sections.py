"""Sections of every config: bad steps, initial parameters, flags of the compiler."""

import re
import shlex
from collections.abc import Iterator, Mapping
from typing import Annotated, Any, Literal, TypeAlias

from pydantic import AfterValidator, Field

from jtrain.config.configclass import configclass
from jtrain.config.registry import Kind, Registry


def _some(window: tuple[int, int]) -> tuple[int, int]:
    first, stop = window
    if 0 <= first < stop:
        return window
    raise ValueError(
        f"must be the first batch that is left out, counted from 0, and the one after the last; "
        f"found [{first}, {stop}]; write [{max(first, 0)}, {max(first, 0) + 1}] for one batch"
    )


def _above_one(factor: float) -> float:
    if factor == 0 or factor > 1:
        return factor
    raise ValueError(f"must be more than 1, or 0 for no bound, found {factor:g}; write 3")


Window: TypeAlias = Annotated[tuple[int, int], AfterValidator(_some)]
Factor: TypeAlias = Annotated[float, Field(ge=0), AfterValidator(_above_one)]


@configclass
class Spike:
    """Definition of a spike among finite steps."""

    loss: Factor = 0.0
    """Factor above the running mean from which a loss is a spike, for example 3; 0: none is."""
    grad_norm: Factor = 0.0
    """Factor above the running mean from which a gradient norm is a spike, for example 10; 0: none
    is."""
    memory: int = Field(default=100, ge=1)
    """Length of the running means in steps. The first steps of that number are never spikes."""


@configclass
class GuardPolicy(Kind):
    """Fields of every policy. A policy of another package defines `make_judge`."""

    without: tuple[Window, ...] = ()
    """Batches to leave out, as windows [first, stop): [[120, 130]] is ten batches. Batches are
    numbered from 0: while none is left out, step 121 takes batch 120."""

    def make_judge(self, known: Mapping[str, Any]) -> Any:
        """Return what judges each step of a run, in order, by the numbers of the whole batch.

        Its `judge(numbers: StepNumbers, was_skipped: bool)` returns None, a `jt.Stop` or a
        `jt.Rollback`; its `state()` returns JSON for a checkpoint, and `known` is what was saved.
        """
        raise NotImplementedError


@configclass
class SkipPolicy(GuardPolicy):
    """Policy that skips steps that are not finite."""

    kind: Literal["skip"] = "skip"
    """Leave the state unchanged, and continue with the next step."""
    window: int = Field(default=50, ge=1)
    """Number of consecutive skipped steps after which the run stops; a shorter run stops if all of
    its steps are skipped."""


@configclass
class RollbackPolicy(GuardPolicy):
    """Policy that resumes from a checkpoint without the batches around the bad step."""

    kind: Literal["rollback"] = "rollback"
    """Resume from the last checkpoint, without the batches around the bad step."""
    spike: Spike = Spike()
    """Finite steps that are bad too."""
    back: int = Field(default=0, ge=0)
    """Number of batches to leave out before the batch of the bad step."""
    skip: int = Field(default=1, ge=1)
    """Number of batches to leave out in all: `back`, the batch of the bad step, and those after."""
    limit: int = Field(default=3, ge=0)
    """Number of rollbacks within `within` steps; at the next bad step the run stops."""
    within: int = Field(default=1000, ge=1)
    """Steps over which rollbacks are counted."""

    def __post_init__(self) -> None:
        if self.skip <= self.back:
            raise ValueError(
                f"skip {self.skip} leaves out {self.skip} batches from {self.back} before the bad "
                f"one on, and so not that one; write skip={self.back + 1} or more"
            )


@configclass
class StopPolicy(GuardPolicy):
    """Policy that ends the run with a report of the bad step."""

    kind: Literal["stop"] = "stop"
    """End the run."""
    spike: Spike = Spike()
    """Finite steps that are bad too."""


Guard: TypeAlias = Annotated[
    SkipPolicy | RollbackPolicy | StopPolicy, Registry("guards", GuardPolicy, "make_judge")
]


def _as_many_stars(pair: tuple[str, str]) -> tuple[str, str]:
    in_file, in_model = (name.count("*") for name in pair)
    if in_file == in_model:
        return pair
    raise ValueError(
        f"must have as many * in both names, as each stands for the same text; found {in_file} in "
        f"{pair[0]} and {in_model} in {pair[1]}"
    )


Pattern = Annotated[str, Field(min_length=1)]
Rename = Annotated[tuple[Pattern, Pattern], AfterValidator(_as_many_stars)]


@configclass
class InitFrom:
    """Trained parameters to start from; the optimizer and the step start afresh.

    Read at the first start of a run only: a resumed run has its parameters in its checkpoint.
    """

    path: str = ""
    """A run (its directory, or its NAME in runs/), a checkpoint of one (runs/NAME/checkpoints/400),
    a file of tensors (.safetensors, .safetensors.index.json), or a published model (a folder with
    config.json, `org/name@revision` on the Hugging Face Hub, a .gguf file); empty: those of
    model.from, or parameters by the seed."""
    step: Literal["newest", "best"] = "newest"
    """Which checkpoint of a run; the best by its own checkpoint.best."""
    include: tuple[Pattern, ...] = ("*",)
    """Patterns on the names of this model's leaves that are loaded. `*` is any text."""
    exclude: tuple[Pattern, ...] = ()
    """Patterns on the names of this model's leaves that are not loaded and start by the seed."""
    rename: tuple[Rename, ...] = ()
    """Pairs [name in the file, name in the model], such as
    [h/*/ln_1/weight, blocks/*/norm/scale]; the first pair that matches a name counts. Dots in the
    names of tensors are slashes."""
    transpose: tuple[Pattern, ...] = ()
    """Patterns on the names of this model's leaves whose dims are reversed in the file."""
    partial: bool = False
    """Whether leaves that the file lacks start by the seed; else a missing leaf is an error."""
    extra: bool = False
    """Whether the model's other state (running statistics) is loaded too; its leaves are called
    extra/NAME."""


@configclass
class XlaConfig:
    """Flags of the compiler, set before JAX has devices; the variables XLA_FLAGS and
    LIBTPU_INIT_ARGS take precedence."""

    preset: Literal["none", "overlap", "deterministic", "fast_compile"] = "none"
    """Flags by name. overlap: transfers between GPUs or TPUs run beside the computation;
    deterministic: GPUs give the same bits run after run; fast_compile: less optimization on a
    CPU."""
    flags: tuple[str, ...] = ()
    """Further flags: [--xla_gpu_enable_triton_gemm=false]; one replaces that of the preset."""
    tpu_flags: tuple[str, ...] = ()
    """Further flags of libtpu, for LIBTPU_INIT_ARGS: [--xla_tpu_scoped_vmem_limit_kib=65536]."""


# A config may be a stranger's, and some flags write files, load or start programs, or connect.
_OUTSIDE = re.compile(
    r"(?<!fast)_(path|file|filename|dir|directory|libdir)(_|$)|_(to|from)$|dump|dylib"
    r"|_extra_(flags|options)|_(address|addresses|url|uri|port|port_name|executable|override)$"
)
_PREFIXES = {"xla.flags": "xla_", "xla.tpu_flags": "(xla|tpu|megascale)_"}
_VARIABLES = {"xla.flags": "XLA_FLAGS", "xla.tpu_flags": "LIBTPU_INIT_ARGS"}


def flag_problems(xla: XlaConfig) -> Iterator[tuple[str, str]]:
    """Yield the keys whose flags have another form, are of the other variable, or act outside."""
    for key, flags in (("xla.flags", xla.flags), ("xla.tpu_flags", xla.tpu_flags)):
        for flag in flags:
            if not re.fullmatch(r"(--)?[a-z]\w*=\S*", flag, re.ASCII):
                yield key, f"must be flags --xla_NAME=VALUE without spaces, found {flag!r}"
            elif key == "xla.flags" and flag.lstrip("-").startswith("xla_tpu_"):
                yield key, f"{flag} is a flag of libtpu; write xla.tpu_flags=[{flag}]"
            elif not _is_inside(flag.lstrip("-"), _PREFIXES[key]):
                typed = shlex.quote("--" + flag.lstrip("-"))
                yield (
                    key,
                    f"{flag} may write or run what lies outside of the run, so no config sets it; "
                    f"if you want that: export {_VARIABLES[key]}={typed}",
                )


def _is_inside(flag: str, prefix: str) -> bool:
    """Return whether a flag only changes how a program is compiled and run."""
    name, _, value = flag.partition("=")
    plain = re.fullmatch(r"([\w.+,:=][\w.+,:=-]*|-?\d+)?", value, re.ASCII)
    return bool(re.match(prefix, name) and plain and not _OUTSIDE.search(name))
