"""`jtrain audit` computes a run's steps again, on any layout, and finds what was changed."""

import dataclasses
import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from quick_study import at_home, config_of, rewrite, trained, write_study

from jtrain.checkpoint import CheckpointManager
from jtrain.cli import main
from jtrain.train.program import set_up
from jtrain.train.run_dir import RunDir


@pytest.fixture(scope="module")
def house(tmp_path_factory: pytest.TempPathFactory, compiled: Path) -> Path:
    """Return a folder with a small study and a run of it, which is certified."""
    folder = tmp_path_factory.mktemp("house")
    path = write_study(folder).relative_to(folder)
    with pytest.MonkeyPatch.context() as patch:
        at_home(folder, patch, compiled)
        trained(path, "steps=12", "checkpoint.every=4", "checkpoint.keep=9")
        command = ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", "key"]
        subprocess.run(command, check=True, timeout=60)
        assert main(["audit", "quick", "--certify", "key"]) == 0
    return folder


@pytest.fixture
def run(house: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, compiled: Path) -> RunDir:
    """Return the directory of a copy of the run."""
    shutil.copytree(house, tmp_path / "house")
    at_home(tmp_path / "house", monkeypatch, compiled)
    sys.modules.pop("experiments.quick", None)
    return RunDir(Path("runs/quick"))


def audited(capsys: pytest.CaptureFixture[str], *typed: str) -> tuple[int, dict]:
    capsys.readouterr()
    code = main(["audit", "quick", "--json", *typed])
    told = capsys.readouterr()
    assert told.out, told.err
    return code, json.loads(told.out)


def change_a_row(run: RunDir) -> None:
    x = "normal(size=(rows, 2)).astype(np.float32)"
    rewrite(f"draw.{x}", f"draw.{x} + 1e-3 * (np.arange(rows)[:, None] == seed)")


def change_the_rate(run: RunDir) -> None:
    rewrite("import jax\n", "import dataclasses\n\nimport jax\n")
    rate = "lr=self.optimizer.lr * 1.0001"
    rewrite("self.optimizer.build(", f"dataclasses.replace(self.optimizer, {rate}).build(")


def change_the_seed(run: RunDir) -> None:
    rewrite("seed=self.seed", "seed=self.seed + 1")


def leave_a_step_out(run: RunDir) -> None:
    rows = [json.loads(line) for line in run.steps.read_text().splitlines()]
    for row in rows:
        for name in ("loss", "grad_norm", "update_norm", "batch"):
            row[name] = [*row[name][1:], row[name][0]]
    run.steps.write_text("".join(json.dumps(row) + "\n" for row in rows))


def change_a_parameter(run: RunDir) -> None:
    program = set_up(config_of(run.config))
    with CheckpointManager(run.checkpoints, owner=run.owner()) as checkpoints:
        state, about = checkpoints.restore(8, program.resolved.abstract_state), checkpoints.about(8)
        shutil.rmtree(run.checkpoints / "8")
        up = state.params["up"].at[0, 3].add(1e-4)
        checkpoints.save(8, dataclasses.replace(state, params={**state.params, "up": up}), about)
        checkpoints.wait()


CHANGES = [change_a_row, change_the_rate, change_the_seed, leave_a_step_out, change_a_parameter]


def test_a_run_holds_and_its_signature_is_good(run, capsys):
    code, found = audited(capsys, "--seed", "1")
    assert (code, found["passed"], found["faults"]) == (0, True, [])
    assert [each["same_bits"] for each in found["steps"]] == [True] * 3
    assert 'Good "jtrain" signature with ED25519 key SHA256:' in found["certificate"]
    code, found = audited(capsys, "--seed", "1", "parallel.kind=fsdp", "parallel.devices=4")
    assert code == 0, found
    assert 0 < max(each["distance"] for each in found["steps"]) < 1e-6


def test_steps_that_cannot_be_drawn_are_counted(run, capsys, monkeypatch):
    monkeypatch.setattr("jtrain.inspect.debug.audit.REACH", 3)  # of 4 steps between checkpoints
    code, found = audited(capsys, "--steps", "12", "--seed", "1")
    assert (code, found["beyond"]) == (0, 3)
    assert [each["step"] for each in found["steps"]] == [1, 2, 3, 5, 6, 7, 9, 10, 11]
    assert main(["audit", "quick", "--steps", "1"]) == 0
    assert "3 steps, more than 3 after a checkpoint, cannot be drawn" in capsys.readouterr().out


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize(
    "layout",
    [
        pytest.param([], id="same layout"),
        pytest.param(["parallel.kind=mirrored"], id="other", marks=pytest.mark.thorough),
    ],
)
def test_a_change_is_found(run, capsys, change, layout):
    change(run)
    code, found = audited(capsys, "--steps", "1", *layout)
    assert code == 1, found
    assert found["faults"] or found["steps"][0]["fault"]


def test_a_certificate_signed_for_another_text_differs_and_one_that_was_cut_is_refused(run, capsys):
    path = run.path / "certificate.txt"
    whole = path.read_text()
    path.write_text(whole.replace("steps 12", "steps 11"))
    assert main(["audit", "quick"]) == 1
    assert "incorrect signature" in capsys.readouterr().out
    path.write_text(whole[:-4])
    assert main(["audit", "quick"]) == 2
    assert "not a whole certificate" in capsys.readouterr().err
