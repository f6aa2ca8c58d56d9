"""Faults of the cluster are found, with the line to type."""

import socket

from fakes import names, result, the, write_files

from jtrain.inspect.doctor import cluster
from jtrain.inspect.doctor.child import Child, ChildResult
from jtrain.inspect.doctor.finding import Finding


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
