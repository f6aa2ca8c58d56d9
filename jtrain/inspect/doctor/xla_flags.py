"""Check of the flags of the compiler, before an unknown one ends the process."""

import shlex
from collections.abc import Iterator, Mapping, Sequence

from jtrain.distributed.compiler_flags import (
    FLAGS,
    LIBTPU_FLAGS,
    VARIABLES,
    closest_flag,
    flag_name,
    is_libtpu_flag,
    refused_values,
    split_flags,
    without_flags,
)
from jtrain.inspect.doctor.finding import Finding, error, ok, warning

DEVICES = "xla_force_host_platform_device_count"


def check_flags(environ: Mapping[str, str]) -> Iterator[Finding]:
    """Return findings about the variables themselves; the compiler judges the names."""
    flags = {name: split_flags(environ.get(name, "")) for name in VARIABLES}
    found = [f"{name}={environ[name]}" for name in VARIABLES if flags[name]]
    faults = [*_check_form(flags), *_check_twice(flags), *_check_count(environ, flags)]
    yield from faults
    if not faults:
        yield ok("flags", "; ".join(found) or "no flag is set")


def check_refused(
    environ: Mapping[str, str], names: Sequence[str], errors: str
) -> Iterator[Finding]:
    """Return a finding for each flag that was refused; one line to type fixes them all.

    Args:
        names: the flags that were refused.
        errors: what jaxlib or libtpu printed.
    """
    values = refused_values(errors)
    remedy = _remedy(environ, names)
    for name in dict.fromkeys(names):
        variable = next((v for v in VARIABLES if _has(environ, v, name)), FLAGS)
        if name in values:
            found = f"{variable}: {values[name]!r} is no value of --{name}; JAX cannot start"
            yield error("flags", "flag-value", found, remedy)
        elif is_libtpu_flag(name) and variable == FLAGS:
            found = f"--{name} is a flag of libtpu, and in XLA_FLAGS it ends the process"
            yield error("flags", "flag-of-libtpu", found, remedy)
        else:
            meant = closest_flag(name)
            found = f"{variable}: --{name} is unknown to the installed compiler, which ends the "
            yield error("flags", "flag-unknown", f"{found}process{meant}", remedy)


def _remedy(environ: Mapping[str, str], names: Sequence[str]) -> str:
    """Return the line that removes flags, and moves those of libtpu to its own variable."""
    rest = without_flags(environ, names)
    moved = [
        flag
        for flag in split_flags(environ.get(FLAGS, ""))
        if flag_name(flag) in names and is_libtpu_flag(flag_name(flag))
    ]
    if moved:
        rest[LIBTPU_FLAGS] = " ".join([*filter(None, [rest.get(LIBTPU_FLAGS)]), *moved])
    return "; ".join(
        f"export {name}={shlex.quote(rest[name])}" if rest[name] else f"unset {name}"
        for name in VARIABLES
        if name in rest and rest[name] != environ.get(name)
    )


def _has(environ: Mapping[str, str], variable: str, name: str) -> bool:
    return name in map(flag_name, split_flags(environ.get(variable, "")))


def _check_form(flags: Mapping[str, Sequence[str]]) -> Iterator[Finding]:
    for variable, words in flags.items():
        bare = [word for word in words if not word.startswith("--") and word.startswith("xla")]
        if bare and variable == FLAGS:
            fixed = " ".join(f"--{word}" if word in bare else word for word in words)
            yield error(
                "flags",
                "flag-without-dashes",
                f"XLA_FLAGS: {bare[0]} has no dashes, and the compiler takes the text for the name "
                f"of a file, or ignores the flag",
                f"export XLA_FLAGS={shlex.quote(fixed)}",
            )


def _check_twice(flags: Mapping[str, Sequence[str]]) -> Iterator[Finding]:
    for variable, words in flags.items():
        last = {flag_name(word): word for word in words}
        if len({*words}) > len(last):
            twice = next(word for word in words if last[flag_name(word)] != word)
            yield warning(
                "flags",
                "flag-twice",
                f"{variable} has {twice} and {last[flag_name(twice)]}: the last one holds",
                f"export {variable}={shlex.quote(' '.join(last.values()))}",
            )


def _check_count(
    environ: Mapping[str, str], flags: Mapping[str, Sequence[str]]
) -> Iterator[Finding]:
    number = environ.get("JAX_NUM_CPU_DEVICES", "")
    forced = [word for word in flags[FLAGS] if flag_name(word) == DEVICES]
    if number and forced and forced[-1] != f"--{DEVICES}={number}":
        yield warning(
            "flags",
            "cpu-devices-twice",
            f"JAX_NUM_CPU_DEVICES={number} and {forced[-1]} differ: the first one holds",
            "unset JAX_NUM_CPU_DEVICES",
        )
