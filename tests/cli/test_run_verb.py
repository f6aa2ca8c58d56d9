"""`jtrain run` and `jtrain check`: what they print at their end, and the exit codes."""

import json
import os
import shlex
import signal
from pathlib import Path

import pytest

from jtrain.cli import main
from jtrain.config.resolve import resolve

CONFIG = "configs/quick.yaml"


@pytest.fixture(autouse=True)
def _home(study_home: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("JAX_NUM_CPU_DEVICES", "8")  # `check` sets it only if it is not set


def commands(out: str) -> list[list[str]]:
    """Return the commands that the summary advises, as words after `jtrain`."""
    lines = [line.removeprefix("next:").strip() for line in out.splitlines()]
    typed = [line.partition("   ")[0] for line in lines if line.startswith("jtrain ")]
    return [shlex.split(words)[1:] for words in typed]


@pytest.mark.thorough
@pytest.mark.parametrize(
    "schedule", ["{kind: constant}", pytest.param("{kind: linear}", marks=pytest.mark.slow)]
)
def test_the_advice_of_the_summary_works(schedule: str, capfd):
    assert main(["run", CONFIG, f"optimizer.schedule={schedule}"]) == 0
    advised = commands(capfd.readouterr().out)
    assert [words[0] for words in advised] == ["run", "run", "eval", "show"]
    assert [main(words) for words in advised] == [0, 0, 0, 0]
    assert "step 24/24" in Path("runs/quick/log.txt").read_text()
    assert Path("runs/quick-2/metrics.jsonl").exists()


@pytest.mark.thorough
def test_a_stopped_run_exits_with_75_and_prints_how_to_resume(capfd, monkeypatch):
    from jtrain.train.hooks.log import MetricsFile

    row = MetricsFile.row

    def ask(metrics, step, prefix, numbers):
        if step == 4:
            os.kill(os.getpid(), signal.SIGTERM)
        row(metrics, step, prefix, numbers)

    with monkeypatch.context() as patch:
        patch.setattr(MetricsFile, "row", ask)
        assert main(["run", CONFIG, "steps=40"]) == 75
    said = capfd.readouterr()
    assert "asked to end (SIGTERM)" in said.out
    assert "SIGTERM: stopping after this step. From 2 s on a second signal stops" in said.err
    (words,) = commands(said.out)
    assert words == ["run", CONFIG, "steps=40"]
    assert main(words) == 0
    assert "step 40/40" in Path("runs/quick/log.txt").read_text()


@pytest.mark.parametrize(
    ("place", "command"),
    [
        ("runs/my copy", "jtrain run 'runs/my copy/config.yaml' 'name=my copy'"),
        ("saved/old", "move it to runs/NAME, and type jtrain run runs/NAME/config.yaml name=NAME"),
        ("a b/runs/one", "cd '{home}/a b' && jtrain run runs/one/config.yaml name=one"),
    ],
)
def test_the_advice_for_a_copied_run_works_anywhere(place: str, command: str, capfd):
    there, home = Path(place), Path.cwd()
    there.mkdir(parents=True)
    (there / "config.yaml").write_text(Path(CONFIG).read_text() + "name: quick\n")
    (there / "run.json").write_text('{"status": "stopped", "step": 0}')
    assert main(["run", f"{place}/config.yaml"]) == 2
    err = capfd.readouterr().err
    assert f"To resume that run: {command.format(home=home)}\n" in err
    other = shlex.split(err.partition("To start another run with its values: ")[2])
    assert resolve(other[2], other[3:]).config.name == "quick-2"
    assert not Path("runs/quick").exists()


@pytest.mark.thorough
def test_all_comparisons_of_a_config_hold(capfd):
    assert main(["check", CONFIG, "--rows", "4", "--devices", "2", "--json"]) == 0
    found = json.loads(capfd.readouterr().out)
    assert found["config"] == CONFIG
    assert found["ok"] is True
    assert "4 of the" in found["what"]
    checks = {check["check"]: check for check in found["checks"]}
    names = {"padded", "2 microbatches", "shard_map on 2", "fsdp on 2 (zero 3)"}
    assert names <= set(checks)
    assert all(check["verdict"] in {"ok", "rounding"} for check in found["checks"])
    assert checks["padded"]["float64"]["gradient"] < 1e-12
    assert 0 < checks["shard_map on 2"]["float32"]["gradient"] < 1e-6


@pytest.mark.thorough
def test_a_fault_ends_with_70_and_a_sentence(capfd):
    study = Path("experiments/quick.py")
    code = study.read_text()
    assert "cross_entropy(" in code
    wrong = (
        "\n\n_right = cross_entropy\n\n\ndef cross_entropy(*given, **more):\n"
        "    mean, metrics = _right(*given, **more)\n"
        "    return jt.Mean(mean.total / mean.weight, jnp.float32(1)), metrics\n"
    )
    head, tail = code.split("\n\n\n@jt.configclass", 1)
    study.write_text(f"{head}{wrong}\n\n@jt.configclass{tail}")
    assert main(["check", CONFIG, "--rows", "4", "--devices", "2"]) == 70
    out = capfd.readouterr().out
    assert "mean of the halves' own means" in out
    assert "Steps were not compared" in out
    assert "comparisons FAIL." in out
