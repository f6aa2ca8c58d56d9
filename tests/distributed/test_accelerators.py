"""Unused accelerators are detected from files of the machine, and reported with advice."""

import sys
from pathlib import Path

import jax
import pytest
from quick_study import config_of, write_study

from jtrain.distributed import accelerators
from jtrain.distributed.accelerators import unused_accelerators
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
    return unused_accelerators(
        platforms or ("cpu",),
        chosen,
        root=root,
        environ=environ,
        has_package=packages.split().__contains__,
    )


@pytest.mark.parametrize(
    ("files", "contents", "said"),
    [
        (["dev/nvidia0", "dev/nvidiactl"], {}, ["an NVIDIA GPU", "'jtrain[cuda12]'"]),
        (
            ["dev/nvidia0", "dev/nvidia1"],
            {"proc/driver/nvidia/version": NEW},
            ["2 NVIDIA GPUs", "'jtrain[cuda13]'"],
        ),
        (["dev/vfio/0"], pci("0x1ae0", "0x0063"), ["a TPU v5e,", "'jtrain[tpu]'"]),
    ],
)
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


def test_an_installed_plugin_that_did_not_start_is_reported(tmp_path):
    root = machine(tmp_path, "dev/nvidia0", "dev/accel0")
    gpu, tpu = lines_for(root, packages="libtpu jax-cuda12-plugin")
    assert "jax-cuda12-plugin is installed and did not start. See why: JAX_PLATFORMS=cuda" in gpu
    assert "libtpu is installed and did not start. See why: JAX_PLATFORMS=tpu python3 -c" in tpu


def test_a_run_logs_it_before_its_first_step_unless_a_platform_was_chosen(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "path", list(sys.path))
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
    assert lines["[1]"][1].startswith(
        "This machine has an NVIDIA GPU, and JAX computes on the CPU: pip"
    )
    assert not any("NVIDIA" in line for line in lines["cpu:0"])
