"""Flags of the compiler: presets by name, their variables, and flags that it refuses.

XLA reads XLA_FLAGS when JAX first needs a device, and libtpu reads LIBTPU_INIT_ARGS when it is
loaded. Both end the process at a flag that they do not know.
"""

import importlib.util
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Mapping, Sequence

from jtrain.errors import ConfigError

FLAGS, LIBTPU_FLAGS = "XLA_FLAGS", "LIBTPU_INIT_ARGS"
VARIABLES = (FLAGS, LIBTPU_FLAGS)
# Sentences of jaxlib (tsl/util/command_line_flags.cc, xla/parse_flags_from_env.cc) and of libtpu.
_UNKNOWN = re.compile(r"Unknown flags? in XLA_FLAGS: (.+)")
_UNKNOWN_TPU = re.compile(r"Unknown command line flag '(\w+)'")
_VALUE = re.compile(r"Couldn't interpret value (.*) for flag (\w+)\.")
_CPU_DEVICES = "xla_force_host_platform_device_count"
_COMMAND_BUFFER = "xla_gpu_enable_command_buffer"

# Each flag exists in jaxlib 0.10.2 and 0.12.0.1, those of libtpu in 0.0.42.1 and 0.0.52.
PRESETS: Mapping[str, Mapping[str, tuple[str, ...]]] = {
    "none": {},
    # Transfers between devices run beside the computation, at the cost of memory. GPU:
    # https://docs.nvidia.com/jax-toolbox/performance-profiling/gpu-performance, without double
    # buffering of loops, which failed with accumulated gradients (jax-ml/jax#22210). TPU: flags
    # that MaxText sets, https://github.com/AI-Hypercomputer/maxtext/tree/main/benchmarks.
    "overlap": {
        FLAGS: (
            "--xla_gpu_enable_latency_hiding_scheduler=true",
            "--xla_gpu_enable_pipelined_all_gather=true",
            "--xla_gpu_enable_pipelined_reduce_scatter=true",
            "--xla_gpu_enable_pipelined_all_reduce=true",
        ),
        LIBTPU_FLAGS: (
            "--xla_tpu_enable_async_collective_fusion=true",
            "--xla_tpu_enable_async_collective_fusion_fuse_all_gather=true",
            "--xla_tpu_enable_async_collective_fusion_multiple_steps=true",
            "--xla_tpu_overlap_compute_collective_tc=true",
            "--xla_enable_async_all_gather=true",
            "--xla_enable_async_collective_permute=true",
            "--xla_tpu_enable_data_parallel_all_reduce_opt=true",
            "--xla_tpu_data_parallel_opt_different_sized_ops=true",
        ),
    },
    # GPUs give the same bits run after run: no kernel adds in the order of arrival.
    "deterministic": {FLAGS: ("--xla_gpu_deterministic_ops=true",)},
    # A CPU compiles small models faster; LLVM fuses no multiply-add at this level.
    "fast_compile": {FLAGS: ("--xla_backend_optimization_level=0",)},
}


def split_flags(text: str) -> list[str]:
    """Split a variable into its flags."""
    try:
        return shlex.split(text)
    except ValueError:  # an open quote
        return text.split()


def flag_name(flag: str) -> str:
    """Return the name of a flag: `xla_gpu_autotune_level` of `--xla_gpu_autotune_level=0`."""
    return flag.lstrip("-").partition("=")[0]


def refused_flags(errors: str) -> dict[str, str]:
    """Return the flags that jaxlib or libtpu refused, from what it printed, by name.

    The value is one that jaxlib could not read; empty where it does not know the flag.
    """
    unknown = [flag_name(each) for line in _UNKNOWN.findall(errors) for each in line.split()]
    unknown += _UNKNOWN_TPU.findall(errors)
    return dict.fromkeys(unknown, "") | {name: value for value, name in _VALUE.findall(errors)}


def merge_flags(
    preset: str, flags: Sequence[str], tpu_flags: Sequence[str], environ: Mapping[str, str]
) -> dict[str, str]:
    """Return the variables with the flags of a config.

    A flag of `flags` replaces that of the preset, and one that a variable has already replaces
    both. LIBTPU_INIT_ARGS is unchanged where libtpu is not installed.

    Raises:
        ConfigError: if collectives are to be recorded in command buffers of a GPU.
    """
    chosen = PRESETS[preset]
    result = {}
    for variable, own in ((FLAGS, flags), (LIBTPU_FLAGS, tpu_flags)):
        given = [*chosen.get(variable, ()), *(f"--{flag.lstrip('-')}" for flag in own)]
        if not given or (variable == LIBTPU_FLAGS and not _has_libtpu()):
            continue
        words = [*given, *split_flags(environ.get(variable, ""))]
        last = {flag_name(word): word for word in words}
        if "COLLECTIVES" in last.get(_COMMAND_BUFFER, ""):
            raise ConfigError(
                f"xla: --{_COMMAND_BUFFER} with COLLECTIVES can hang a run after hours, without a "
                f"word (https://github.com/marin-community/marin/issues/5675). Leave it out."
            )
        result[variable] = shlex.join(last.values())
    return {name: value for name, value in result.items() if value != environ.get(name)}


def apply_flags(preset: str, flags: Sequence[str], tpu_flags: Sequence[str]) -> list[str]:
    """Set the variables of the compiler for this process; return lines that say so.

    Call it before JAX has devices.

    Raises:
        ConfigError: if the compiler does not know a flag, or JAX has devices already.
    """
    changed = merge_flags(preset, flags, tpu_flags, os.environ)
    if not changed:
        check_environment()
        return []
    if has_devices():
        words = " ".join(f"{name}={shlex.quote(value)}" for name, value in changed.items())
        raise ConfigError(
            f"xla: the flags must be set before JAX has devices, and it has them already. Set them "
            f"before the process starts: {words}"
        )
    check_known(changed)
    os.environ.update(changed)
    return [f"xla: {name}={value}" for name, value in changed.items()]


def check_environment() -> None:
    """Check the flags that the variables of this process have already, once and before JAX does.

    Without flags, or with the number of CPU devices alone, it takes no time.

    Raises:
        ConfigError: naming the flags that would end the process.
    """
    given = {}
    for name in VARIABLES if _has_libtpu() else [FLAGS]:
        text = os.environ.get(name, "")
        if any(flag_name(flag) != _CPU_DEVICES for flag in split_flags(text)):
            given[name] = text
    if given and given not in _checked and not has_devices():
        check_known(given)
        _checked.append(given)


_checked: list[Mapping[str, str]] = []  # variables that the compiler has taken


def check_known(variables: Mapping[str, str]) -> None:
    """Let a child process read the flags, which ends at one that is unknown.

    Raises:
        ConfigError: naming the flags.
    """
    errors = "".join(
        _try(code, {name: variables[name], **more})
        for name, (code, more) in _READERS.items()
        if name in variables
    )
    refused = refused_flags(errors)
    if not refused:
        return
    found = [f"--{name}={value}" if value else f"--{name}" for name, value in refused.items()]
    them = "it" if len(found) == 1 else "them"
    raise ConfigError(
        f"xla: the installed compiler refuses {', '.join(found)}, and would end the process. "
        f"Remove {them} from xla.flags, xla.tpu_flags or the variable {' or '.join(VARIABLES)}."
    )


# What reads a variable, and ends at an unknown flag. libtpu is loaded for a topology, so that the
# chips stay free.
_READERS: Mapping[str, tuple[str, Mapping[str, str]]] = {
    FLAGS: ("from jaxlib import xla_client; xla_client.CompileOptions()", {}),
    LIBTPU_FLAGS: (
        "from jax.experimental import topologies as t; "
        "t.get_topology_desc(platform='tpu', topology_name='v5e:2x2')",
        {
            "JAX_PLATFORMS": "cpu",
            "TPU_SKIP_MDS_QUERY": "1",
            "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
            FLAGS: "",
        },
    ),
}


def _try(code: str, environ: Mapping[str, str]) -> str:
    """Run code in a child process; return what it printed."""
    try:
        done = subprocess.run(
            [sys.executable, "-c", code],
            env={**os.environ, **environ},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=60,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):  # the run itself will tell
        return ""
    return done.stdout + done.stderr


def _has_libtpu() -> bool:
    return importlib.util.find_spec("libtpu") is not None


def has_devices() -> bool:
    """Return whether JAX has started devices, after which a change of their number is refused."""
    if "jax" not in sys.modules:
        return False
    import jax

    name = "jax_num_cpu_devices"
    number = getattr(jax.config, name)
    try:
        jax.config.update(name, 2 if number == 1 else 1)
    except RuntimeError:
        return True
    jax.config.update(name, number)
    return False
