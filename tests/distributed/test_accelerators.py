"""Unused accelerators are reported with advice; presets of the compiler's flags, their order."""

import json
import os
from pathlib import Path

import jax
import pytest
from plain_environ import run_python
from quick_study import config_of, write_study

from jtrain.cli import main
from jtrain.distributed import accelerators, compiler_flags
from jtrain.distributed.accelerators import unused_accelerators
from jtrain.distributed.compiler_flags import (
    FLAGS,
    LIBTPU_FLAGS,
    PRESETS,
    apply_flags,
    check_known,
    flag_name,
    merge_flags,
)
from jtrain.errors import ConfigError
from jtrain.train.program import set_up
from jtrain.train.summary import banner_lines

NEW = (
    "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.65.06  Sun May 12 2024\n"
    "GCC version:  gcc version 12.3.0\n"
)


def machine(root: Path, *files: str, **contents: str) -> Path:
    """Create a file system with empty files, and with files that have contents."""
    for file in files:
        (root / file).parent.mkdir(parents=True, exist_ok=True)
        (root / file).touch()
    for file, text in contents.items():
        (root / file).parent.mkdir(parents=True, exist_ok=True)
        (root / file).write_text(text)
    return root


def pci(vendor: str, device: str) -> dict[str, str]:
    at = "sys/bus/pci/devices/0000:00:04.0"
    return {f"{at}/vendor": f"{vendor}\n", f"{at}/device": f"{device}\n"}


def lines_for(root: Path, *platforms: str, chosen: str = "", packages: str = "", **environ: str):
    has, where = packages.split().__contains__, {"root": root, "environ": environ}
    return unused_accelerators(platforms or ("cpu",), chosen, has_package=has, **where)


@pytest.mark.parametrize(
    ("files", "contents", "said"),
    [
        (["dev/nvidia0", "dev/nvidiactl"], {}, ["an NVIDIA GPU", "'jtrain[cuda12]'"]),
        (["dev/nvidia0", "dev/nvidia1"], {"proc/driver/nvidia/version": NEW},
            ["2 NVIDIA GPUs", "'jtrain[cuda13]'"]),
        (["dev/vfio/0"], pci("0x1ae0", "0x0063"), ["a TPU v5e,", "'jtrain[tpu]'"]),
    ],
)  # fmt: skip
def test_an_unused_accelerator_is_reported_with_a_command(tmp_path, files, contents, said):
    (line,) = lines_for(machine(tmp_path, *files, **contents))
    assert line.startswith("This machine has ")
    assert "and JAX computes on the CPU: pip install 'jtrain[" in line
    for words in said:
        assert words in line


def test_a_machine_without_one_gets_no_line(tmp_path):
    others = "dev/null", "dev/nvidia-caps/nvidia-cap1", "dev/accel/accel0", "dev/vfio/vfio"
    assert lines_for(machine(tmp_path, *others)) == []


def test_no_line_if_jax_uses_it_or_a_platform_was_chosen(tmp_path):
    root = machine(tmp_path, "dev/nvidia0", "dev/accel0")
    assert len(lines_for(root)) == 2
    assert lines_for(root, "gpu") == lines_for(root, "tpu") == lines_for(root, "gpu", "cpu") == []
    assert lines_for(root, chosen="cpu") == []


def test_a_run_logs_it_before_its_first_step_unless_a_platform_was_chosen(tmp_path, monkeypatch):
    monkeypatch.setattr(accelerators, "installed_version", lambda package: "")  # no plugins
    write_study(tmp_path)
    root = machine(tmp_path / "root", "dev/nvidia0")
    assert jax.devices()  # start the CPU backend before the setting is removed
    platforms = jax.config.jax_platforms
    jax.config.update("jax_platforms", "")  # as if JAX_PLATFORMS were not set
    try:
        lines = {}
        for devices in ("[1]", "cpu:0"):
            path, settings = tmp_path / "configs/quick.yaml", [f"parallel.devices={devices}"]
            program = set_up(config_of(path, settings))
            lines[devices] = banner_lines(program.resolved, program.schedule, None, root)
    finally:
        jax.config.update("jax_platforms", platforms)
    assert lines["[1]"][1].startswith("This machine has an NVIDIA GPU, and JAX computes on the CPU")
    assert not any("NVIDIA" in line for line in lines["cpu:0"])


ROOT = Path(__file__).parents[2]


def test_the_compiler_knows_each_flag_of_the_presets():
    """A child process reads them, as the first device would, with their values."""
    flags = [flag for each in PRESETS.values() for flag in each.get(FLAGS, ())]
    check_known({FLAGS: " ".join(flags)})


@pytest.mark.compiler
def test_libtpu_knows_each_flag_of_the_presets():
    flags = " ".join(flag for each in PRESETS.values() for flag in each.get(LIBTPU_FLAGS, ()))
    check_known({LIBTPU_FLAGS: flags})
    with pytest.raises(ConfigError, match="refuses --xla_tpu_nonsense"):
        check_known({LIBTPU_FLAGS: "--xla_tpu_nonsense=1"})


def test_the_nearer_flag_wins(monkeypatch):
    """A flag of the config replaces that of the preset, one of the environment both."""
    monkeypatch.setattr(compiler_flags, "_has_libtpu", lambda: True)
    ours = ("--xla_backend_optimization_level=1", "xla_cpu_enable_fast_math=false")
    merged = merge_flags("fast_compile", ours, ("--xla_tpu_a=1",), {})
    assert merged == {FLAGS: f"{ours[0]} --{ours[1]}", LIBTPU_FLAGS: "--xla_tpu_a=1"}
    environ = {FLAGS: "--xla_backend_optimization_level=2 --xla_b=3"}
    merged = merge_flags("fast_compile", ours, (), environ)
    assert merged[FLAGS].split() == [
        "--xla_backend_optimization_level=2",
        "--xla_cpu_enable_fast_math=false",
        "--xla_b=3",
    ]
    assert merge_flags("fast_compile", (), (), merged) == {}  # the second run of a process


def test_collectives_stay_out_of_command_buffers():
    with pytest.raises(ConfigError, match="COLLECTIVES can hang"):
        merge_flags("none", ("--xla_gpu_enable_command_buffer=FUSION,COLLECTIVES",), (), {})


def test_flags_of_libtpu_need_libtpu(monkeypatch):
    monkeypatch.setattr(compiler_flags, "_has_libtpu", lambda: False)
    assert list(merge_flags("overlap", (), (), {})) == [FLAGS]
    monkeypatch.setattr(compiler_flags, "_has_libtpu", lambda: True)
    merged = merge_flags("overlap", (), (), {})
    assert list(merged) == [FLAGS, LIBTPU_FLAGS]
    assert all(flag_name(each).startswith("xla_gpu_") for each in merged[FLAGS].split())


def test_an_unknown_flag_of_the_environment_is_an_error_and_no_crash(monkeypatch, capsys):
    monkeypatch.setattr(compiler_flags, "has_devices", lambda: False)
    monkeypatch.setenv(FLAGS, "--xla_force_host_platform_device_count=8 --xla_gpu_nonsense=1")
    assert main(["eval", "digits"]) == 2
    assert "refuses --xla_gpu_nonsense" in capsys.readouterr().err


def test_too_late_once_jax_has_devices(monkeypatch):
    monkeypatch.setenv(FLAGS, "")
    assert jax.devices()
    number = jax.config.jax_num_cpu_devices  # pyright: ignore[reportAttributeAccessIssue]
    with pytest.raises(ConfigError, match="XLA_FLAGS=--xla_backend_optimization_level=0"):
        apply_flags("fast_compile", (), ())
    assert os.environ[FLAGS] == ""
    assert jax.config.jax_num_cpu_devices == number  # pyright: ignore[reportAttributeAccessIssue]


@pytest.mark.thorough
def test_a_run_prints_and_records_its_flags_and_a_resume_says_what_changed(tmp_path):
    write_study(tmp_path)
    usual = {key: x for key, x in os.environ.items() if key not in (FLAGS, LIBTPU_FLAGS)}

    def run(*settings: str) -> None:
        env = {**usual, "PYTHONPATH": str(ROOT)}
        run_python("-m", "jtrain", "run", "configs/quick.yaml", *settings, cwd=tmp_path, env=env)

    level = "--xla_backend_optimization_level=0"
    run("xla.preset=fast_compile", "steps=4")
    log = tmp_path / "runs/quick/log.txt"
    assert f"xla: XLA_FLAGS={level}" in log.read_text()
    record = json.loads((tmp_path / "runs/quick/run.json").read_text())
    assert record["flags"] == {FLAGS: level}
    run("xla.flags=[xla_cpu_enable_fast_math=false]", "steps=8")
    said = log.read_text()
    assert "resumes from step 4 of 8" in said
    other = "--xla_cpu_enable_fast_math=false"
    assert f"XLA_FLAGS was {level}, and is {other}" in said
    assert "xla.preset" in said
