"""Flags of the compiler."""

import re
import shlex
from collections.abc import Iterator
from typing import Literal

from jtrain.config.configclass import configclass


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


def misfitting_flags(xla: XlaConfig) -> Iterator[tuple[str, str]]:
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
