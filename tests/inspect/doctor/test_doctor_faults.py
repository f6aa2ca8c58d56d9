"""Faults of packages, disk, devices and cluster are found, each with the line to type."""

import sys
from pathlib import Path

import pytest
from fakes import healthy, install, names, result, the, write_files
from faulty_disks import permissions_hold

from jtrain.distributed.cpu_threads import describe_small_pool
from jtrain.inspect.doctor import packages
from jtrain.inspect.doctor.checks import ChildResult, Finding, start_child
from jtrain.inspect.doctor.devices import check_devices
from jtrain.inspect.doctor.disk import check_disk, probe
from jtrain.inspect.doctor.examine import check_cluster, gather_cluster

PYTHON = Path(sys.executable).name


def checked(folder: Path) -> list[Finding]:
    return packages.check_packages(packages.gather_packages([str(folder)]))


def test_a_healthy_environment_has_one_line(tmp_path):
    (finding,) = checked(healthy(tmp_path))
    assert finding.status == "ok"
    assert "jax 0.10.2, jaxlib 0.10.2, flax 0.12.8" in finding.found


@pytest.mark.parametrize(
    ("without", "versions", "name", "words", "remedy"),
    [
        ([], {"jaxlib": "0.7.2"}, "jaxlib-version", "jaxlib<=0.10.2,>=0.10.1", "'jaxlib==0.10.2'"),
        (
            [],
            {"jax__cuda12__plugin": "0.7.2"},
            "plugin-version",
            "jax-cuda12-plugin 0.7.2 does not work with jaxlib 0.10.2",
            "'jax[cuda12]==0.10.2'",
        ),
        (
            [],
            {"libtpu": "0.0.21.1"},
            "libtpu-version",
            "jax 0.10.2 requires libtpu==0.0.42.*, and libtpu 0.0.21.1",
            "'jax[tpu]==0.10.2'",
        ),
        ([], {"flax": "0.11.2"}, "package-version", "jtrain requires flax>=0.12.6", "'flax>=0.12"),
        (["xxhash"], {}, "package-missing", "xxhash is not installed", "'xxhash>=3.5'"),
    ],
)
def test_packages_that_do_not_fit(tmp_path, without, versions, name, words, remedy):
    (finding,) = checked(healthy(tmp_path, *without, **versions))
    assert finding.name == name
    assert words in finding.found
    assert finding.remedy.startswith(f"{PYTHON} -m pip ")
    assert remedy in finding.remedy


def test_a_newer_libtpu_serves_plans(tmp_path):
    assert names(checked(healthy(tmp_path, libtpu="0.0.52"))) == ["ok"]


def test_two_copies_of_jax(tmp_path):
    """As an upgrade into the user's folder leaves them, or one that was interrupted."""
    first = install(tmp_path / "user", jax="0.7.2")
    second = healthy(tmp_path / "site")
    found = packages.check_packages(packages.gather_packages([str(first), str(second)]))
    finding = the(found, "package-twice")
    assert f"0.7.2 in {first}, 0.10.2 in {second}" in finding.found
    assert finding.remedy.endswith(f"--target {first} 'jax==0.10.2'")
    install(second, jax="0.9.0")
    half = the(checked(second), "package-twice")
    assert "--force-reinstall --no-deps 'jax==0." in half.remedy


def test_the_same_package_on_two_paths_is_one(tmp_path):
    first, second = healthy(tmp_path / "a"), healthy(tmp_path / "b")
    found = packages.check_packages(packages.gather_packages([str(first), str(second)]))
    assert names(found) == ["ok"]


def test_without_the_metadata_of_jtrain_a_line_says_so(tmp_path):
    (finding,) = checked(healthy(tmp_path, "jtrain"))
    assert (finding.name, finding.status) == ("package-missing", "warning")
    assert finding.remedy == f"{PYTHON} -m pip install jtrain"


def probed(directory: Path) -> ChildResult:
    reports = {}
    probe(directory, lambda **values: reports.update(values))
    return result(**reports)


def test_a_healthy_disk_and_nothing_is_left(tmp_path):
    ended = probed(tmp_path / "runs/deep")
    assert ended.reports["existing"] == str(tmp_path)
    assert list(tmp_path.iterdir()) == []
    if not {"disk-little", "disk-slow"} & {*names(check_disk(tmp_path, ended))}:
        (finding,) = check_disk(tmp_path, ended)
        assert finding.status == "ok"


def test_a_directory_that_cannot_be_written(tmp_path):
    runs = tmp_path / "runs"
    runs.mkdir(mode=0o500)
    with permissions_hold():
        finding = the(check_disk(runs, probed(runs)), "disk-write")
    assert "Permission denied" in finding.found
    assert "chmod u+rwx" in finding.found
    runs.chmod(0o700)
    with permissions_hold():
        assert "disk-write" not in names(check_disk(runs, probed(runs)))


def test_space_and_speed(tmp_path):
    slow = {"bytes": 1 << 20, "seconds": 1.0, "fsync_seconds": 0.7}
    fast = {"bytes": 1 << 25, "seconds": 0.1, "fsync_seconds": 0.001}
    for free, write, found in (
        (50_000_000, slow, ["disk-full", "disk-slow"]),
        (1_000_000_000, fast, ["disk-little"]),
        (10**11, fast, ["ok"]),
    ):
        ended = result(space={"free": free}, write=write, existing=str(tmp_path))
        assert names(check_disk(tmp_path, ended)) == found


def test_a_file_server_that_hangs(tmp_path, monkeypatch):
    write_files(tmp_path, {"hanging.py": "import time\ndef main(given): time.sleep(60)\n"})
    monkeypatch.syspath_prepend(str(tmp_path))
    with start_child("hanging", {}, timeout=0.5) as wait:
        ended = wait()
    (finding,) = check_disk(tmp_path, ended)
    assert finding.name == "disk-hangs"
    assert "its file server hangs" in finding.found


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


@pytest.mark.parametrize(
    ("ended", "name", "words"),
    [
        (result(1, "Traceback\n  File\nImportError: libz.so.1"), "jax-import", "libz.so.1"),
        (result(1, "ModuleNotFoundError: No module named 'jax'"), "jax-import", "not install"),
        (result(-4, ""), "jax-import", "killed by SIGILL"),
        (result(None, ""), "jax-import", "did not end within 1 s"),
        (result(1, "E: no", jax="0.10.2"), "devices-fail", "no device starts: E: no"),
        (
            result(
                1, "ABORTED: Internal error when accessing libtpu multi-process lockfile", jax=1
            ),
            "libtpu-locked",
            "one process at a time",
        ),
    ],
)
def test_a_start_that_fails(tmp_path, ended, name, words):
    (finding,) = judged(tmp_path, ended)
    assert finding.name == name
    assert words in finding.found
    assert finding.remedy
    assert finding.status == "error"


def clustered(**environ: str) -> list[Finding]:
    return list(check_cluster(gather_cluster(environ), environ))


def test_one_process():
    assert names(clustered()) == ["ok"]


@pytest.mark.parametrize(
    ("environ", "name", "remedy"),
    [
        ({"MASTER_ADDR": "10.0.0.1", "RANK": "1"}, "cluster-variables", "Set WORLD_SIZE too"),
        ({"SLURM_JOB_ID": "7", "SLURM_NTASKS": "4"}, "cluster-without-srun", "srun jtrain doctor"),
        ({"K_MPI_JOB_ROLE": "launcher"}, "cluster-alone", "type mpirun before it"),
    ],
)
def test_a_process_outside_of_its_cluster(environ, name, remedy):
    assert the(clustered(**environ), name).remedy.startswith(remedy)


def test_a_proxy_between_the_processes():
    proxied = {"JTRAIN_COORDINATOR": "127.0.0.1:61234"}
    proxied |= {"JTRAIN_PROCESSES": "2", "JTRAIN_PROCESS": "0"}
    found = the(clustered(http_proxy="http://proxy:3128", **proxied), "cluster-proxy")
    assert found.remedy == "export no_proxy=127.0.0.1"
    fixed = clustered(http_proxy="http://proxy:3128", no_proxy="127.0.0.1", **proxied)
    assert names(fixed) == ["ok"]


def test_a_child_reports_until_it_dies(tmp_path, monkeypatch):
    write_files(
        tmp_path,
        {
            "dying.py": "import os, signal, sys\n"
            "from jtrain.inspect.doctor.checks import report\n"
            "def main(given):\n"
            "    print('of another library')\n"
            "    report(first=given['x'])\n"
            "    print('why', file=sys.stderr, flush=True)\n"
            "    os.kill(os.getpid(), signal.SIGSEGV)\n"
        },
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    with start_child("dying", {"x": [1]}, timeout=300) as wait:
        ended = wait()
    assert ended.reports == {"first": [1]}
    assert ended.errors == "why\n"
    assert ended.ending == "was killed by SIGSEGV"
