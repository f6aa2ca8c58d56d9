"""Flags of the compiler."""

import re
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


def misfitting_flags(xla: XlaConfig) -> Iterator[tuple[str, str]]:
    """Yield the keys whose flags have another form, or are of the other variable."""
    for key, flags in (("xla.flags", xla.flags), ("xla.tpu_flags", xla.tpu_flags)):
        for flag in flags:
            if not re.fullmatch(r"(--)?[a-z]\w*=\S*", flag, re.ASCII):
                yield key, f"must be flags --xla_NAME=VALUE without spaces, found {flag!r}"
            elif key == "xla.flags" and flag.lstrip("-").startswith("xla_tpu_"):
                yield key, f"{flag} is a flag of libtpu; write xla.tpu_flags=[{flag}]"
