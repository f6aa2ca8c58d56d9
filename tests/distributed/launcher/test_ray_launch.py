"""A real Ray on this machine: kills, restarts, nodes that go, clusters that do not fit."""

import importlib.util
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from quick_study import write_study

from chaos.launched import differences, home_of, until
from chaos.ray_launch import SLOW, TRIALS, Cluster, shared_cluster, undisturbed
from jtrain.train.hooks.metrics import read_metrics

pytestmark = pytest.mark.slow
PATIENCE = 600  # seconds; alone on two cores a launch takes about 15
RUN = ["run", "configs/quick.yaml", "parallel.kind=mirrored"]


@pytest.fixture(autouse=True)
def _ray() -> None:
    if importlib.util.find_spec("ray") is None:
        pytest.skip("NOT TESTED: Ray is not installed; pip install 'jtrain[ray]'")


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    pytest.importorskip("ray", reason="NOT TESTED: pip install 'jtrain[ray]'")
    with shared_cluster(cpus=3) as cluster:
        yield cluster


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("trials")


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    write_study(tmp_path)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def launched(*words: str, **environ: str) -> tuple[int, str]:
    """Return the exit code of a launch by Ray, and what it says."""
    environment = {**os.environ, "JAX_PLATFORMS": "cpu", **environ}
    environment.pop("XLA_FLAGS", None)
    command = [sys.executable, "-m", "jtrain", "launch", "--engine", "ray", *words]
    done = subprocess.run(
        command, env=environment, capture_output=True, text=True, timeout=PATIENCE, check=False
    )
    return done.returncode, done.stdout + done.stderr


@pytest.mark.parametrize("name", list(TRIALS))
def test_a_run_survives(name: str, cluster: Cluster, folder: Path):
    trial = TRIALS[name](1, folder, cluster.address)
    assert trial.passed, trial.detail


def test_more_processes_than_fit_are_refused_with_what_the_cluster_has(cluster: Cluster, home):
    at = ["--address", cluster.address, "--wait", "1"]
    code, said = launched(*at, "--processes", "4", *RUN)
    assert code == 2, said
    assert "4 processes of CPU=1 each do not fit on the Ray cluster, which holds 3" in said
    assert "Type --processes 3, or add nodes" in said
    assert not (home / "runs").exists()
    code, said = launched(*at, "--resources", "GPU=1", *RUN)
    assert code == 2, said
    assert "GPU=0" in said


def test_a_range_takes_the_room_that_there_is_and_another_number_resumes(cluster: Cluster, home):
    at = ["--address", cluster.address, "--wait", "1"]
    code, said = launched(*at, "--processes", "2:4", *RUN, "steps=6", "batch=24")
    assert code == 0, said
    assert "process 0 of 3 (jtrain)" in said
    code, said = launched(*at, "--processes", "2", *RUN, "steps=12", "batch=24")
    assert code == 0, said
    assert "process 0 of 2 (jtrain)" in said
    rows = [row["step"] for row in read_metrics(home / "runs/quick/metrics.jsonl") if "loss" in row]
    assert rows == list(range(1, 13))


def test_a_user_error_is_not_restarted(cluster: Cluster, home):
    at = ["--address", cluster.address, "--restarts", "3"]
    code, said = launched(*at, *RUN, "stepz=3")
    assert code == 2, said
    assert "stepz" in said
    assert "Restarted" not in said


def test_a_cluster_wants_its_token(cluster: Cluster, home):
    code, said = launched("--address", cluster.address, *RUN, RAY_AUTH_TOKEN_PATH="/dev/null")
    assert code == 2, said
    assert "wants its token. Copy ~/.ray/auth_token" in said


def test_a_cluster_of_another_version_is_refused_with_both(home):
    with shared_cluster(cpus=1, version="2.50.1") as other:
        code, said = launched("--address", other.address, *RUN)
    assert code == 2, said
    assert "has Ray 2.50.1 and Python" in said
    assert "Type: pip install 'ray==2.50.1'" in said


def test_a_run_goes_on_with_fewer_processes_after_a_node_went(home):
    with shared_cluster(cpus=1) as two_nodes:
        node = two_nodes.add_node(f"--address={two_nodes.address}", cpus=1)
        environment = {**os.environ, "JAX_PLATFORMS": "cpu"}
        environment.pop("XLA_FLAGS", None)
        options = ["--address", two_nodes.address, "--processes", "1:2", "--wait", "20"]
        command = [sys.executable, "-m", "jtrain", "launch", "--engine", "ray", *options]
        said = home / "said.txt"
        with (
            said.open("w") as file,
            subprocess.Popen(
                [*command, "--restarts", "2", *RUN, "steps=1500", "checkpoint.every=50"],
                env=environment,
                stdout=file,
                stderr=subprocess.STDOUT,
            ) as process,
        ):
            try:
                rows = home / "runs/quick/metrics.jsonl"
                until(lambda: len(read_metrics(rows)) > 100, PATIENCE)
                os.killpg(node.pid, signal.SIGKILL)
                assert process.wait(timeout=PATIENCE) == 0, said.read_text()
            finally:
                process.kill()
    words = said.read_text()
    assert "process 0 of 2 (jtrain)" in words
    assert "Restarted (1 of 2) from checkpoint" in words
    assert words.count("resumes from step") == 1
    steps = [row["step"] for row in read_metrics(rows) if "loss" in row]
    assert steps == list(range(1, 1501)), "each row once"


CONNECT = """\
import os

import ray

ray.init(address=os.environ["CLUSTER"], log_to_driver=False)
"""
ON_CPUS = {
    "use_gpu=True)": 'resources_per_worker={"CPU": 1}), jax_config=JaxConfig(use_gpu=True)',
    "num_workers=4": "num_workers=2",
    "RunConfig(": 'RunConfig(storage_path=os.environ["STORE"], worker_runtime_env=ENV, ',
    "import JaxTrainer": "import JaxTrainer\nfrom ray.train.v2.jax.config import JaxConfig",
}


def trained_by_ray(
    home: Path, cluster: Cluster, changes: dict[str, str], **environ: str
) -> tuple[int, str]:
    """Run the example of docs/clusters/ray.md in a directory, with some of its words changed."""
    page = (Path(__file__).parents[3] / "docs" / "clusters" / "ray.md").read_text()
    (code,) = re.findall(r"^```py\n(.*?)^```$", page, re.MULTILINE | re.DOTALL)
    for one, other in changes.items():
        assert one in code, one
        code = code.replace(one, other)
    workers = {"env_vars": {"JAX_PLATFORMS": "cpu", **environ}}
    (home / "trainer.py").write_text(f"{CONNECT}ENV = {workers!r}\n{code}")
    known = {"CLUSTER": cluster.address, "STORE": str(home / "store"), "JAX_PLATFORMS": "cpu"}
    done = subprocess.run(
        [sys.executable, "trainer.py"],
        cwd=home,
        env={**os.environ, **known},
        capture_output=True,
        text=True,
        timeout=PATIENCE,
        check=False,
    )
    return done.returncode, done.stdout + done.stderr


@pytest.fixture
def hurt(folder: Path) -> Path:
    return home_of(folder, "trainer")


def config(*settings: str) -> dict[str, str]:
    words = ", ".join(f'"{word}"' for word in settings)
    return {"configs/shakespeare.yaml": "configs/hurt.yaml", '"steps=100"': words}


def test_jax_trainer_restarts_a_worker_that_fails_and_the_bits_are_the_same(
    hurt: Path, folder: Path, cluster: Cluster
):
    calm = undisturbed(folder, cluster.address)
    fault = f"raises 0 20 {hurt / 'mark'}"
    changes = ON_CPUS | config("parallel.kind=mirrored")
    code, said = trained_by_ray(hurt, cluster, changes, **{**SLOW, "FAULT": fault})
    assert code == 0, said
    assert (hurt / "mark").exists(), "it was hurt"
    assert "resumes from step" in (hurt / "runs" / "hurt" / "log.txt").read_text()
    assert differences(hurt, calm.home) == ""


def test_jax_trainer_does_not_repeat_a_user_error(hurt: Path, cluster: Cluster):
    code, said = trained_by_ray(hurt, cluster, ON_CPUS | config("stepz=3"), **SLOW)
    assert code != 0
    assert "ControllerError: Training failed due to controller error" in said
    assert "did you mean steps?" in said


def test_workers_that_ray_did_not_join_do_not_train_each_by_itself(hurt: Path, cluster: Cluster):
    apart = ON_CPUS | {"use_gpu=True)": 'resources_per_worker={"CPU": 1})'}
    code, said = trained_by_ray(hurt, cluster, apart | config("parallel.kind=mirrored"), **SLOW)
    assert code != 0
    assert "Ray Train started 2 workers and did not join them" in said
    assert not (hurt / "runs").exists()
