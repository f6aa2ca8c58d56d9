"""Faults of devices are found, each with the line to type."""

from pathlib import Path

import pytest
from fakes import install, names, result, the, write_files

from jtrain.distributed.cpu_threads import describe_small_pool
from jtrain.inspect.doctor import packages
from jtrain.inspect.doctor.checks import ChildResult
from jtrain.inspect.doctor.devices import check_devices


def judged(root: Path, ended: ChildResult, site: Path | None = None, **environ: str):
    installed = packages.gather_packages([str(site)] if site else [])
    return list(check_devices(installed, environ, ended, root))


CPU = {"platform": "cpu", "id": 0, "kind": "cpu"}
STARTED = result(
    jax="0.10.2",
    import_seconds=0.5,
    device_seconds=0.1,
    devices=[CPU, CPU],
    chosen="",
    messages=["Unable to initialize backend 'cuda': no driver"],
    stage="end",
)


def test_devices(tmp_path):
    (finding,) = judged(tmp_path, STARTED)
    assert finding.status == "ok"
    assert finding.found.startswith("2 x cpu (cpu), jax 0.10.2")


def test_too_few_threads_for_the_cpu_devices(tmp_path):
    """As where a script has started JAX before it imports jtrain."""
    lines = describe_small_pool(1000)
    started = result(**{**STARTED.reports, "pool": lines})
    finding = the(judged(tmp_path, started), "device-threads")
    assert "threads for 1000 CPU devices, whose collectives can deadlock" in finding.found
    assert "Import jtrain before JAX starts its devices, or set NPROC=" in finding.remedy


def test_an_unused_gpu_and_why(tmp_path):
    root = write_files(tmp_path / "root", {"dev/nvidia0": ""})
    unused = the(judged(root, STARTED), "accelerator-unused")
    assert unused.remedy == "pip install 'jtrain[cuda12]'"
    chosen = result(**{**STARTED.reports, "chosen": "cpu"})
    assert names(judged(root, chosen)) == ["ok"]
    site = install(tmp_path / "site", jax__cuda12__plugin="0.10.2")
    again = the(judged(root, STARTED, site), "accelerator-unused")
    assert again.remedy == 'JAX_PLATFORMS=cuda python3 -c "import jax; jax.devices()"'
    assert "no driver" in again.found
    hidden = the(judged(root, STARTED, site, CUDA_VISIBLE_DEVICES="-1"), "gpus-hidden")
    assert hidden.remedy == "unset CUDA_VISIBLE_DEVICES"


@pytest.mark.parametrize(
    ("driver", "plugin", "remedy"),
    [("535.183.01", "cuda13", "'jtrain[cuda12]'"), ("470.42", "cuda12", "update the driver")],
)
def test_an_old_driver(tmp_path, driver, plugin, remedy):
    version = f"NVRM version: NVIDIA UNIX x86_64 Kernel Module  {driver}  Sun May 12 2024\n"
    root = write_files(tmp_path / "root", {"proc/driver/nvidia/version": version})
    site = install(tmp_path / "site", **{f"jax__{plugin}__plugin": "0.10.2"})
    finding = the(judged(root, STARTED, site), "driver-old")
    assert driver.partition(".")[0] in finding.found
    assert remedy in finding.remedy


def test_cuda_of_another_version_on_the_library_path(tmp_path):
    site = install(tmp_path / "site", jax__cuda12__plugin="0.10.2")
    old = write_files(tmp_path / "cuda-11/lib64", {"libcudnn.so.8": "", "libz.so.1": ""})
    path = f"{tmp_path}:{old}:/nowhere"
    finding = the(judged(tmp_path, STARTED, site, LD_LIBRARY_PATH=path), "cuda-library-path")
    assert str(old) in finding.found
    assert finding.remedy == "unset LD_LIBRARY_PATH"
    assert names(judged(tmp_path, STARTED, None, LD_LIBRARY_PATH=path)) == ["ok"]


def test_a_plugin_without_a_device(tmp_path):
    site = install(tmp_path / "site", jax__cuda12__plugin="0.10.2")
    finding = the(judged(tmp_path, STARTED, site), "plugin-without-device")
    assert finding.remedy == "nvidia-smi || export JAX_PLATFORMS=cpu"


@pytest.mark.parametrize(
    ("ended", "environ", "name", "words"),
    [
        (result(1, "Traceback\n  File\nImportError: libz.so.1"), {}, "jax-import", "libz.so.1"),
        (result(1, "ModuleNotFoundError: No module named 'jax'"), {}, "jax-import", "not install"),
        (result(-4, ""), {}, "jax-import", "killed by SIGILL"),
        (result(None, ""), {}, "jax-import", "did not end within 1 s"),
        (result(-6, "F1 bad\n", jax="0.10.2"), {}, "devices-crash", "killed by SIGABRT: F1 bad"),
        (result(None, jax="0.10.2"), {}, "devices-hang", "did not end within"),
        (result(1, "E: no", jax="0.10.2"), {}, "devices-fail", "no device starts: E: no"),
        (
            result(1, "AssertionError", jax="0.10.2", messages=[]),
            {"JAX_PLATFORMS": "cuda"},
            "platform-missing",
            "no package for cuda is installed",
        ),
        (
            result(
                1, "ABORTED: Internal error when accessing libtpu multi-process lockfile", jax=1
            ),
            {},
            "libtpu-locked",
            "one process at a time",
        ),
    ],
)
def test_a_start_that_fails(tmp_path, ended, environ, name, words):
    (finding,) = judged(tmp_path, ended, None, **environ)
    assert finding.name == name
    assert words in finding.found
    assert finding.remedy
    assert finding.status == "error"
