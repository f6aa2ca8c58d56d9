"""Ray: what becomes of addresses, resources and messages, and runs by Ray Train."""

import os
import re
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
from quick_study import write_study

import jtrain as jt
from chaos.launched import differences, home_of, start_run
from jtrain.cli import launch, main
from jtrain.distributed.ray_cluster import (
    forwarded,
    parse_address,
    parse_resources,
    process_resources,
)
from jtrain.errors import ConfigError, UserError
from jtrain.train.ray import RunEndedError, working_directory

RUN = ["run", "configs/quick.yaml"]


@pytest.mark.parametrize(
    ("text", "says"),
    [("GPU", "type CPU=4,GPU=1"), ("GPU=inf", "type CPU=4,GPU=1"), ("gpu=2", "type GPU=2")],
)
def test_resources_are_parsed_or_refused_with_what_to_type(text: str, says: str):
    assert parse_resources("CPU=4,GPU=0.5") == {"CPU": 4, "GPU": 0.5}
    with pytest.raises(UserError, match=says):
        parse_resources(text)


def test_a_process_gets_a_gpu_where_there_are_any(monkeypatch: pytest.MonkeyPatch):
    cluster = SimpleNamespace(cluster_resources=lambda: {"CPU": 8.0, "GPU": 4.0})
    monkeypatch.delenv("JAX_PLATFORMS", raising=False)
    assert process_resources(cluster, {}) == {"CPU": 1, "GPU": 1}
    assert process_resources(cluster, {"GPU": 2}) == {"CPU": 1, "GPU": 2}
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")
    assert process_resources(cluster, {}) == {"CPU": 1}


def test_addresses_are_recognised_or_refused_with_the_forms():
    assert parse_address("", "") == "local"
    assert parse_address("auto", "10.0.0.1:6379") == "auto", "what is typed counts"
    assert parse_address("", "head:6379") == "head:6379"
    for typed in ("10.0.0.1", "ray://10.0.0.1:10001"):
        with pytest.raises(UserError, match="Type --address HOST:6379 "):
            parse_address(typed, "")


def test_variables_of_the_driver_are_forwarded_by_name():
    environ = {"JAX_PLATFORMS": "cpu", "HOME": "/home/me", "DATA": "/data"}
    assert forwarded(environ, "DATA") == {"JAX_PLATFORMS": "cpu", "DATA": "/data"}
    with pytest.raises(UserError, match=r"--env names TOKEN, which is not set here\. Type export"):
        forwarded(environ, "TOKEN")


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--address", "auto", *RUN], "local takes no --address; .* type --engine ray"),
        (["--engine", "ray", "check", "x.yaml"], "Type --engine ray run CONFIG KEY=VALUE"),
        (["--engine", "ray", *RUN, "--fast"], "found run --fast"),
    ],
)
def test_an_engine_says_what_it_does_not_take(words: list[str], says: str, capsys):
    assert main(["launch", *words]) == 2
    assert re.search(says, capsys.readouterr().err)


class TrainingFailedError(Exception):
    """Ray Train's error at the end of a training that failed."""

    def __init__(self, **facts):
        super().__init__("Training failed")
        vars(self).update(facts)


class WrappedError(Exception):
    """A worker's error as Ray Train passes it on."""

    def __init__(self, error: Exception):
        super().__init__("a traceback")
        self._base_exc = error


class FakeTrainer:
    """A trainer that ends as it was asked, and keeps its arguments."""

    failure: BaseException | None = None

    def __init__(self, **arguments):
        FakeTrainer.arguments = arguments

    def fit(self):
        if FakeTrainer.failure is not None:
            raise FakeTrainer.failure


@pytest.fixture
def fake_ray(monkeypatch: pytest.MonkeyPatch) -> type[FakeTrainer]:
    def module(name: str, **contents):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
        vars(sys.modules[name]).update(contents)

    contents = {"init": lambda **_: None, "shutdown": lambda: None}
    module("ray", cluster_resources=dict, **contents)
    keeps = lambda **arguments: SimpleNamespace(**arguments)
    module(
        "ray.train",
        TrainingFailedError=TrainingFailedError,
        UserCallback=object,
        **dict.fromkeys(("ScalingConfig", "RunConfig", "FailureConfig"), keeps),
    )
    module("ray.train.v2.jax", JaxTrainer=FakeTrainer)
    module("ray.train.v2.jax.config", JaxConfig=keeps)
    monkeypatch.setattr(launch, "check_installed", lambda *_: None)
    monkeypatch.setattr(FakeTrainer, "failure", None)
    for name in ("RAY_ADDRESS", "RAY_AUTH_TOKEN"):
        monkeypatch.setenv(name, "")  # which the launch sets
        monkeypatch.delenv(name)
    return FakeTrainer


def ended(code: int) -> RunEndedError:
    error = RunEndedError("the run ended early")
    error.code = code
    return error


@pytest.mark.parametrize(
    ("failure", "code", "says"),
    [
        (None, 0, ""),
        (TrainingFailedError(controller_failure=ConfigError("steps is 0")), 2, "steps is 0"),
        (TrainingFailedError(worker_failures={1: WrappedError(ConfigError("lr"))}), 2, "lr"),
        (TrainingFailedError(worker_failures={0: WrappedError(ended(75))}), 75, "ended early"),
        (TrainingFailedError(worker_failures={0: WrappedError(ended(70))}), 70, "ended early"),
        (TrainingFailedError(worker_failures={0: OSError("died")}), 70, "Training failed"),
        (SystemExit(15), 75, "the same command resumes"),
    ],
)
def test_the_end_of_a_training_becomes_an_exit_code(failure, code, says, fake_ray, capsys):
    fake_ray.failure = failure
    assert main(["launch", "--engine", "ray", *RUN]) == code
    assert says in capsys.readouterr().err


def test_ray_train_restarts_the_workers_but_not_after_a_mistake(fake_ray: type[FakeTrainer]):
    words = ["--processes", "4", "--restarts", "3", "--devices", "2"]
    assert main(["launch", "--engine", "ray", *words, *RUN, "steps=7"]) == 0
    loop, run = fake_ray.arguments["train_loop_config"], fake_ray.arguments["run_config"]
    assert loop == {"config": RUN[1], "overrides": ["steps=7"], "directory": os.getcwd()}
    assert fake_ray.arguments["scaling_config"].num_workers == 4
    assert run.failure_config.max_failures == 3
    assert run.worker_runtime_env["env_vars"]["JAX_NUM_CPU_DEVICES"] == "2"
    (callback,) = run.callbacks
    callback.after_exception(None, {0: WrappedError(OSError("killed"))})
    with pytest.raises(ConfigError, match="no key stepz"):
        callback.after_exception(None, {0: WrappedError(ConfigError("no key stepz"))})


@pytest.mark.slow
def test_a_killed_worker_is_restarted_to_the_same_bits(tmp_path: Path):
    pytest.importorskip("ray", reason="NOT TESTED: pip install 'jtrain[ray]'")
    calm, hurt = home_of(tmp_path, "calm"), home_of(tmp_path, "hurt")
    with start_run(calm, 2) as run:
        assert run.wait() == 0, run.words(40)
    options = ["--engine", "ray", "--restarts", "2", "--env", "FAULT,READ,COMPILE"]
    with start_run(hurt, 2, *options, fault=f"killed 0 20 {hurt}/mark") as run:
        assert run.wait(900) == 0, run.words(40)
    assert (hurt / "mark").exists(), "it was killed"
    assert "resumes from step" in (hurt / "runs" / "hurt" / "log.txt").read_text()
    assert differences(hurt, calm) == ""


@pytest.mark.slow
def test_a_mistake_is_not_retried(tmp_path: Path):
    pytest.importorskip("ray", reason="NOT TESTED: pip install 'jtrain[ray]'")
    home = home_of(tmp_path, "mistake")
    (home / "configs" / "hurt.yaml").write_text("experiment: hurt\nstepz: 3\n")
    with start_run(home, 2, "--engine", "ray", "--restarts", "2") as run:
        assert run.wait(900) == 2, run.words(40)
    assert "did you mean steps?" in run.words(40)


def test_a_run_is_in_the_directory_of_its_driver(tmp_path: Path):
    path = write_study(tmp_path / "project")
    search = ["", str(tmp_path), str(tmp_path / "project")]
    assert working_directory("configs/quick.yaml", "", search) == tmp_path / "project"
    assert working_directory("configs/quick.yaml", str(tmp_path), search) == tmp_path
    with pytest.raises(ConfigError, match='Write "directory": "/shared/project" beside "config"'):
        working_directory(str(path), "", search)
    assert working_directory(str(path), str(tmp_path), search) == tmp_path


@pytest.mark.thorough
def test_a_worker_trains_and_reports(study_home, tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(tmp_path))
    reports: list[dict] = []
    module, context = ModuleType("ray.train"), SimpleNamespace(get_world_size=lambda: 1)
    vars(module).update(get_context=lambda: context, report=reports.append)
    monkeypatch.setitem(sys.modules, "ray.train", module)
    jt.ray.train_loop({"config": "configs/quick.yaml", "overrides": ["steps=4", "log.every=2"]})
    trained = [report for report in reports if "loss" in report]
    assert [report["step"] for report in trained] == [2, 4]
    evaluated = [report for report in reports if "valid/loss" in report]
    assert evaluated[-1]["step"] == 4
    assert all(type(value) in {int, float} for report in reports for value in report.values())
    assert (tmp_path / "runs" / "quick" / "metrics.jsonl").exists()
