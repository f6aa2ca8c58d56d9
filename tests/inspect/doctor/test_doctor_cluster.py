"""Faults of the compile cache, the clock and the cluster are found, with the line to type."""

import os
import socket
import subprocess
import zlib
from pathlib import Path
from types import SimpleNamespace

import pytest
from fakes import names, result, the, write_files

from jtrain.inspect.doctor import cache, clock, cluster
from jtrain.inspect.doctor.child import Child, ChildResult
from jtrain.inspect.doctor.finding import Finding

ENTRY = "jit_step-1-cache"


@pytest.fixture
def programs(tmp_path) -> Path:
    directory = tmp_path / "home/jtrain/compiled"
    directory.mkdir(parents=True, mode=0o700)
    (directory / ENTRY).write_bytes(zlib.compress(b"program" * 1000))
    return directory


def cached(home: Path | str, named: str = "") -> list[Finding]:
    environ = {"JAX_COMPILATION_CACHE_DIR": named} if named else {}
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(home))
        return list(cache.check_cache(cache.gather_cache(environ)))


def test_a_compile_cache(tmp_path, programs):
    (finding,) = cached(tmp_path / "home")
    assert finding.found == f"{programs}: 1 programs, {(programs / ENTRY).stat().st_size} B"
    assert "not used yet" in cached(tmp_path / "elsewhere")[0].found
    assert "object store" in cached(tmp_path, "gs://bucket/programs")[0].found


def test_a_damaged_program(tmp_path, programs):
    entry = programs / ENTRY
    entry.write_bytes(entry.read_bytes()[:-9])
    (programs / "jit_other-2-cache").write_bytes(b"")
    finding = the(cached(tmp_path / "home"), "cache-damaged")
    assert "and 1 more" in finding.found
    subprocess.run(finding.remedy, shell=True, check=True)
    assert names(cached(tmp_path / "home")) == ["ok"]


def test_a_cache_that_others_may_write(tmp_path, programs):
    programs.chmod(0o777)
    finding = the(cached(tmp_path / "home"), "cache-untrusted")
    subprocess.run(finding.remedy, shell=True, check=True)
    assert names(cached(tmp_path / "home")) == ["ok"]


def test_a_cache_that_cannot_be_written(tmp_path):
    finding = the(cached(tmp_path, "/proc/programs"), "cache-unwritable")
    command = f"{finding.remedy}; printf %s $JAX_COMPILATION_CACHE_DIR"
    made = subprocess.run(command, shell=True, check=True, capture_output=True, text=True).stdout
    assert names(cached(tmp_path, made)) == ["ok"]
    Path(made).rmdir()


def test_a_locked_cache(tmp_path, programs, holder):
    (programs / ".lockfile").touch()
    assert names(cached(tmp_path / "home")) == ["ok"]  # a file that nobody holds is no lock
    (programs / ".lockfile").unlink()
    (programs / ".lockfile").hardlink_to(holder.file)
    pid = holder("flock")
    finding = the(cached(tmp_path / "home", str(programs)), "cache-locked")
    assert finding.remedy == f"kill {pid}"


def test_a_program_that_is_removed_meanwhile_is_left_out(programs, monkeypatch):
    gone, listed = programs / "jit_gone-4-cache", os.scandir
    gone.touch()

    def removed_meanwhile(directory):
        found = list(listed(directory))
        gone.unlink(missing_ok=True)
        return found

    environ = {"JAX_COMPILATION_CACHE_DIR": str(programs)}
    known = cache.gather_cache(environ)
    monkeypatch.setattr(os, "scandir", removed_meanwhile)
    assert cache.gather_cache(environ).entries == known.entries - 1


def test_a_cache_that_grew_large(tmp_path, programs):
    with (programs / "jit_huge-3-cache").open("wb") as file:
        file.truncate(30_000_000_000)  # a hole
    facts = cache.gather_cache({"JAX_COMPILATION_CACHE_DIR": str(programs / "none")})
    facts = facts._replace(exists=True, num_bytes=30_000_000_000, entries=2, writable=True)
    finding = the(cache.check_cache(facts), "cache-large")
    assert finding.remedy.endswith("-mtime +30 -delete")


def reading(wall: float, monotonic: float) -> clock.ClockReading:
    return clock.ClockReading(wall, monotonic)


def test_the_clock():
    now = 1_800_000_000.0
    fine = (now, now + 0.01, now + 0.02)
    usual = reading(now, 10.0), reading(now + 3, 13.0)
    assert names(clock.check_clock(*usual, fine)) == ["ok"]
    jumped = reading(now, 10.0), reading(now + 5, 13.0)
    assert "set by +2.0 s" in the(clock.check_clock(*jumped, None), "clock-jumps").found
    old = reading(10.0, 1.0), reading(11.0, 2.0)
    assert "1970" in the(clock.check_clock(*old, None), "clock-year").found
    for file, words in ((now + 60, "60.0 s ahead of"), (now - 60, "60.0 s behind")):
        found = clock.check_clock(*usual, (now, file, now + 0.02))
        assert words in the(found, "clock-file-server").found
    apart = the(clock.check_clock(*usual, fine, processes_skew=7.0), "clock-processes")
    assert "7.00 s apart" in apart.found


def test_a_process_that_is_held_up_between_the_clocks_has_no_clock_that_jumps(monkeypatch):
    now, wall_reads = SimpleNamespace(seconds=0.0), []

    def wall() -> float:
        seconds = 1_800_000_000.0 + now.seconds
        wall_reads.append(seconds)
        now.seconds += 5.0 if len(wall_reads) == 1 else 0.001  # held up after the first
        return seconds

    monkeypatch.setattr(clock, "time", SimpleNamespace(time=wall, monotonic=lambda: now.seconds))
    found = clock.read_clock()
    assert found.wall - found.monotonic == pytest.approx(1_800_000_000.0, abs=0.01)


def clustered(ended: ChildResult | None = None, **environ: str) -> list[Finding]:
    return list(cluster.check_cluster(cluster.gather_cluster(environ), environ, ended))


def test_one_process():
    assert names(clustered()) == ["ok"]


def test_half_set_variables():
    finding = the(clustered(MASTER_ADDR="10.0.0.1", RANK="1"), "cluster-variables")
    assert "WORLD_SIZE is missing" in finding.found
    assert finding.remedy.startswith("Set WORLD_SIZE too")


def test_a_slurm_job_without_srun():
    finding = the(clustered(SLURM_JOB_ID="7", SLURM_NTASKS="4"), "cluster-without-srun")
    assert finding.remedy == "srun jtrain doctor"


def test_a_process_beside_the_launcher_of_a_job():
    finding = the(clustered(K_MPI_JOB_ROLE="launcher"), "cluster-alone")
    assert finding.remedy == "type mpirun before it"


def two(port: int, **more: str) -> dict[str, str]:
    address = f"127.0.0.1:{port}"
    return {
        "JTRAIN_COORDINATOR": address,
        "JTRAIN_PROCESSES": "2",
        "JTRAIN_PROCESS": "0",
        **more,
    }


def test_a_port_in_use():
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        finding = the(clustered(**two(port)), "cluster-port")
        assert "Address already in use" in finding.found
        assert "JTRAIN_COORDINATOR" in finding.remedy
        assert names(clustered(**{**two(port), "JTRAIN_PROCESS": "1"})) == ["ok"]
    assert names(clustered(**two(port))) == ["ok"]


def test_a_proxy_between_the_processes():
    proxied = {**two(0), "JTRAIN_COORDINATOR": "127.0.0.1:61234"}
    found = the(clustered(http_proxy="http://proxy:3128", **proxied), "cluster-proxy")
    assert found.remedy == "export no_proxy=127.0.0.1"
    fixed = clustered(http_proxy="http://proxy:3128", no_proxy="127.0.0.1", **proxied)
    assert names(fixed) == ["ok"]


def test_processes_that_do_not_meet():
    error = "1 of 2 processes reached it; process 1 did not. Start it with the same variables."
    found = clustered(result(1, join_error=error), **two(61235))
    assert the(found, "cluster-join").remedy == "Start it with the same variables."


def test_a_child_reports_until_it_dies(tmp_path, monkeypatch):
    write_files(
        tmp_path,
        {
            "dying.py": "import os, signal, sys\n"
            "from jtrain.inspect.doctor.child import Reporter\n"
            "def main(given, file):\n"
            "    report = Reporter(file, given['timeout'])\n"
            "    report(first=given['x'])\n"
            "    print('why', file=sys.stderr, flush=True)\n"
            "    os.kill(os.getpid(), signal.SIGSEGV)\n"
        },
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    with Child("dying", {"x": [1]}, timeout=300) as child:
        ended = child.wait()
    assert ended.reports == {"first": [1]}
    assert ended.errors == "why\n"
    assert ended.ending == "was killed by SIGSEGV"
