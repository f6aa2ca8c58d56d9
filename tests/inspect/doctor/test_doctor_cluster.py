"""Faults of the cluster are found, with the line to type."""

from fakes import names, the, write_files

from jtrain.inspect.doctor.checks import Finding, start_child
from jtrain.inspect.doctor.examine import check_cluster, gather_cluster


def clustered(**environ: str) -> list[Finding]:
    return list(check_cluster(gather_cluster(environ), environ))


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
