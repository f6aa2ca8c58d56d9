"""`jtrain check`: the split of a batch must not change what a config trains."""

import json
from pathlib import Path

import pytest
from quick_study import at_home, write_study

from jtrain.cli import main
from jtrain.cli.check import Progress


@pytest.fixture(autouse=True)
def _home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    at_home(tmp_path, monkeypatch, tmp_path / "compiled")
    monkeypatch.setenv("JAX_NUM_CPU_DEVICES", "8")  # `check` sets it only if it is not set


@pytest.mark.thorough
def test_all_comparisons_of_a_config_hold(tmp_path: Path, capfd):
    config = str(write_study(tmp_path))
    assert main(["check", config, "--rows", "4", "--devices", "2", "--json"]) == 0
    found = json.loads(capfd.readouterr().out)
    assert found["config"] == config
    assert found["ok"] is True
    assert "4 of the" in found["what"]
    checks = {check["check"]: check for check in found["checks"]}
    assert {"eager", "padded", "2 microbatches", "shard_map on 2", "fsdp on 2 (zero 3)"} <= set(
        checks
    )
    assert all(check["verdict"] in {"ok", "rounding"} for check in found["checks"])
    assert checks["padded"]["float64"]["gradient"] < 1e-12
    assert 0 < checks["shard_map on 2"]["float32"]["gradient"] < 1e-6


@pytest.mark.thorough
def test_a_fault_ends_with_70_and_a_sentence(tmp_path: Path, capfd):
    config = write_study(tmp_path)
    study = next((tmp_path / "experiments").glob("*.py"))
    code = study.read_text()
    assert "cross_entropy(" in code
    wrong = (
        "\n\n_right = cross_entropy\n\n\ndef cross_entropy(*given, **more):\n"
        "    mean, metrics = _right(*given, **more)\n"
        "    return jt.Mean(mean.total / mean.weight, jnp.float32(1)), metrics\n"
    )
    head, tail = code.split("\n\n\n@jt.configclass", 1)
    study.write_text(f"{head}{wrong}\n\n@jt.configclass{tail}")
    assert main(["check", str(config), "--rows", "4", "--devices", "2"]) == 70
    out = capfd.readouterr().out
    assert "mean of the halves' own means" in out
    assert "Steps were not compared" in out
    assert "comparisons FAIL." in out


def changed(tmp_path: Path, old: str, new: str) -> str:
    """Write a study with changed code; return its config."""
    config = write_study(tmp_path)
    study = next((tmp_path / "experiments").glob("*.py"))
    assert old in study.read_text()
    study.write_text(study.read_text().replace(old, new))
    return str(config)


@pytest.mark.slow
def test_a_draw_that_depends_on_the_layout_ends_with_70_and_the_rest_can_be_compared(
    tmp_path: Path, capfd
):
    foreign = "jax.random.bernoulli(jt.row_keys(rng, batch)[0], 0.75, x.shape)"
    config = changed(tmp_path, "jax.vmap(keep)(jt.row_keys(rng, batch))", foreign)
    words = ["check", config, "--rows", "4", "--devices", "2"]
    assert main(words) == 70
    *_, last = capfd.readouterr().out.splitlines()
    assert last.startswith("NOT one result: random draws depend on the layout")
    assert main([*words, "--without-draws"]) == 0
    assert capfd.readouterr().out.splitlines()[-1].startswith("one result")


@pytest.mark.thorough
def test_labels_are_checked_beyond_the_compared_rows(tmp_path: Path, capfd):
    wrong = "train.arrays['label'][150] = 7"
    config = changed(tmp_path, "check_labels(train, self.data.classes)", wrong)
    assert main(["check", config, "--rows", "4", "--devices", "2"]) == 70
    out = capfd.readouterr().out
    assert "batch['label'] holds 7 in row" in out
    assert "index 3 entries, 0 .. 2, of an array of shape" in out


def test_a_loss_that_cannot_be_traced_ends_with_2_and_its_line(tmp_path: Path, capfd):
    asks = "if float(params['bias'].sum()) >= 0 or rng is not None:"
    config = changed(tmp_path, "if rng is not None:", asks)
    assert main(["check", config]) == 2
    err = capfd.readouterr().err
    assert "takes a value that JAX has not computed yet for a Python number (float" in err
    assert f"    {asks}" in err
    assert "Traceback" not in err


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ([], "write jtrain check configs/NAME.yaml"),
        (["batch=4"], "the first word is a config file, found batch=4"),
        (["CONFIG", "--rows", "1"], "--rows 1 is too few to split; write --rows 8"),
        (["CONFIG", "--devices", "0"], "--devices 0 is too few to split; write --devices 8"),
        (["CONFIG", "--row", "4"], "no option --row; the options are"),
        (["CONFIG", "batch=1"], "this batch has 1. Give at least 2"),
    ],
)
def test_errors_are_reported_with_a_command(words, said, tmp_path: Path, capfd):
    config = str(write_study(tmp_path))
    assert main(["check", *[config if word == "CONFIG" else word for word in words]]) == 2
    assert said in capfd.readouterr().err


def test_progress_is_shown_at_once_and_then_each_few_seconds_by_the_work_that_is_done():
    now, lines = [100.0], []
    progress = Progress(lines.append, lambda: now[0])
    progress.begin("called twice")
    assert len(lines) == 1
    for _ in range(60):
        now[0] += 1
        progress.event()
    progress.begin("padded")
    assert len(lines) == 13, "one each 5 s"
    assert "padded" not in lines[-1]
    now[0] += 5
    progress.begin("eager")
    assert "comparing: eager (65 s, 60 programs)" in lines[-1]
