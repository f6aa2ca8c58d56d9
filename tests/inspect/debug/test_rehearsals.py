"""`jtrain run --fast`, `--overfit N` and `--eager` find errors and write no files."""

import re
from pathlib import Path

import pytest
from comparison import assert_close
from quick_study import config_of, rewrite, trained

from jtrain.cli import main
from jtrain.errors import CheckpointError
from jtrain.inspect.debug.rehearsals import dry_run
from jtrain.train.hooks.log import read_results

pytestmark = pytest.mark.usefixtures("study_home")
CONFIG = "configs/quick.yaml"
SAMPLE = "optimizer=self.optimizer.build(self.steps),\n"
LOSS = 'x = jnp.tanh(batch["x"] @ params["up"] + params["bias"][None])\n'
INDENT = " " * 12


# --fast


@pytest.mark.thorough
def test_fast_runs_all_stages_and_writes_no_files(capfd):
    text = "sample=lambda params, extra, key: 'a text',\n"
    rewrite(SAMPLE, SAMPLE + INDENT + text)
    assert main(["run", CONFIG, "--fast"]) == 0
    out = capfd.readouterr().out.splitlines()
    parts = "builds reads compiles trains evaluates saves restores resumes samples"
    assert [line.split()[0] for line in out[:-1]] == parts.split()
    assert all(re.search(r"\d+\.\d\d s$", line) for line in out[:-1])
    assert "48 parameters" in out[0]
    assert "x float32[5, 16, 2], label int32[5, 16]" in out[1]
    assert re.search(r"trains +10 steps, loss [\d.]+ -> [\d.]+ ", out[3])
    assert "32 rows" in out[4], "two batches of the evaluation set and not all of it"
    assert "steps 11 to 20 to the same bits" in out[7]
    assert out[-1].startswith("everything works")
    assert not Path("runs").exists()


@pytest.mark.slow
def test_fast_finds_state_outside_of_the_train_state():
    code = "train=Forgetful(train, size=self.batch, seed=self.seed),\n"
    rewrite("train=Shuffled(train, size=self.batch, seed=self.seed),\n", code)
    file = Path("experiments/quick.py")
    forgetful = """

class Forgetful(Shuffled):
    times = 0

    def __getitem__(self, step):
        Forgetful.times += 1
        batch = super().__getitem__(step)
        return {**batch, "x": batch["x"] + np.float32(Forgetful.times)}


def points("""
    file.write_text(file.read_text().replace("\n\ndef points(", forgetful))
    with pytest.raises(CheckpointError, match=r"a resumed run differs .* params/"):
        dry_run(config_of(CONFIG), log=lambda line: None)
    assert not Path("runs").exists()


# --overfit


@pytest.mark.thorough
def test_overfit_reports_that_a_batch_is_memorized(capfd):
    settings = ["steps=400", "model.drop=0", "model.width=32", "optimizer.lr=5e-2", "log.every=50"]
    assert main(["run", CONFIG, *settings, "batch=4", "--overfit", "2"]) == 0
    last = capfd.readouterr().out.splitlines()[-1]
    assert last.startswith("2 batches")
    assert "It memorizes them" in last
    first, after = map(float, re.findall(r"loss (\S+) -> (\S+)\.", last)[0])
    assert after <= 0.05 * first
    assert not Path("runs").exists()


@pytest.mark.thorough
def test_overfit_reports_causes_if_nothing_is_learned(capfd):
    rewrite('params["bias"][None]', '0 * params["bias"][None]')
    settings = ["steps=1 epochs", "optimizer={kind: sgd, lr: 1e-6}"]
    assert main(["run", CONFIG, *settings, "--overfit", "1"]) == 70
    out = capfd.readouterr().out
    assert "1 batch, 13 steps" in out  # 200 rows, 16 a step
    assert "It does not decrease" in out
    assert "no step changed bias" in out
    assert "optimizer.lr" in out


# --eager


@pytest.mark.slow
def test_eager_prints_once_a_step_and_matches_the_compiled_run(capfd, monkeypatch):
    seen = 'print("seen", params["up"].sum().item(), x.shape, rng is None)'
    rewrite(LOSS, f"{LOSS}{INDENT}if WATCHED:\n{INDENT}    {seen}\n")
    file = Path("experiments/quick.py")
    file.write_text(file.read_text() + "\n\nWATCHED = True\n")
    settings = ["steps=3", "evaluate.every=0"]
    assert main(["run", CONFIG, *settings, "--eager"]) == 0
    out = capfd.readouterr().out.splitlines()
    prints = [line.split()[1:] for line in out if line.startswith("seen")]
    assert len(prints) == 4, "three steps and an evaluation"
    assert len({float(line[0]) for line in prints}) == 4, "the parameters of each step"
    assert [line[-1] for line in prints] == ["False"] * 3 + ["True"]
    assert not Path("runs").exists()
    monkeypatch.setattr("experiments.quick.WATCHED", False)
    outcome = trained(CONFIG, *settings)
    want = [row["loss"] for row in read_results(outcome.directory.metrics, "").values()]
    losses = [float(re.findall(r"loss (\S+)", line)[0]) for line in out if line[:4] == "step"]
    assert_close(losses, want, 1e-4)


@pytest.mark.thorough
def test_several_processes_raise(monkeypatch, capsys):
    for name, value in {"COORDINATOR": "127.0.0.1:4000", "PROCESSES": "2", "PROCESS": "1"}.items():
        monkeypatch.setenv(f"JTRAIN_{name}", value)
    assert main(["run", CONFIG, "--find-nan"]) == 2
    said = capsys.readouterr().err
    assert "in one process, and this command has 2 (JTRAIN_PROCESSES=2" in said
