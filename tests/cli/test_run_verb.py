"""`jtrain run`: the summary at its end, and the exit code."""

import os
import shlex
import signal
from pathlib import Path

import pytest
from quick_study import at_home, write_study

from jtrain.cli import main
from jtrain.config.resolve import resolve

CONFIG = "configs/quick.yaml"


@pytest.fixture(autouse=True)
def _home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, compiled: Path):
    write_study(tmp_path)
    at_home(tmp_path, monkeypatch, compiled)


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
