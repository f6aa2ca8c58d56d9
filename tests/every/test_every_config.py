"""What holds for every file in configs/. A new one is a new row of TINY and a golden file.

The golden files are what a reviewer reads: every value that a config resolves to, and the losses of
the first steps. Where they are meant to change, write them anew and commit them with the change:
`PYTHONPATH=tests python tests/every/test_every_config.py`.
"""

import os
import tempfile
from pathlib import Path

import jax
import numpy as np
import pytest
from comparison import assert_close
from quick_study import At, run_quietly
from tiny_configs import TINY, write_sets

import jtrain as jt
from jtrain.config.dump import dump
from jtrain.config.resolve import resolve
from jtrain.parallel import Mirrored
from jtrain.testing import check
from jtrain.testing.case import build_loss_case
from jtrain.train.hooks.log import read_results
from jtrain.train.loaded_run import load_run

ROOT = Path(__file__).parents[2]
GOLDEN = ROOT / "tests" / "golden"
CONFIGS = {path.stem: path for path in sorted((ROOT / "configs").glob("*.yaml"))}

CURVES = ["shakespeare"]
# Experiments whose model says something of a row; of the others one samples.
PREDICTS = {
    *("digits", "embeddings", "fashion_mnist", "heat", "image_folder", "mnist1d", "two_towers"),
    "vae",
}


def tiny(name: str, *settings: str):
    return resolve(CONFIGS[name], [*TINY[name], "log.every=1", "evaluate.every=0", *settings])


def losses(name: str) -> list[float]:
    """Of the first 20 steps on one device; it writes into the directory where it is called."""
    settings = ("steps=20", "parallel={kind: single}", f"name={name}-curve")
    enough = At(20, lambda: jt.Stop("enough"))  # no evaluation and no sample at the end
    outcome = run_quietly(tiny(name, *settings).config, [enough])
    return [row["loss"] for row in read_results(outcome.directory.metrics, "").values()]


def resolved(name: str) -> str:
    return dump(resolve(CONFIGS[name]).config, f"What configs/{name}.yaml resolves to.")


@pytest.fixture(autouse=True)
def _home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("JAX_COMPILATION_CACHE_DIR", str(tmp_path / "compiled"))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("JTRAIN_DATA", str(tmp_path))
    write_sets(tmp_path)


def test_each_has_its_row_and_its_golden_file():
    assert list(CONFIGS) == sorted(TINY)
    assert sorted(CONFIGS) == sorted(path.stem for path in (GOLDEN / "configs").glob("*.yaml"))
    assert sorted(CURVES) == sorted(path.stem for path in (GOLDEN / "curves").glob("*.txt"))


@pytest.mark.parametrize("name", CONFIGS)
def test_resolves_to_its_golden_file_and_says_how_to_run_it(name: str):
    golden = GOLDEN / "configs" / f"{name}.yaml"
    assert resolved(name) == golden.read_text(), (
        f"if it was meant: PYTHONPATH=tests python {Path(__file__)}"
    )
    assert resolve(CONFIGS[name]).config.name == name
    lines = CONFIGS[name].read_text().splitlines()
    header = lines[: next(i for i, line in enumerate(lines) if not line.startswith("#"))]
    assert f"jtrain run configs/{name}.yaml" in " ".join(header)


# One of each kind of experiment; the others are slow.
TRAINED = {
    *("digits", "fashion_mnist", "gan", "mixtral_8x7b", "policy_gradient", "tiny_shakespeare"),
    "vae",
}


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    "name",
    [
        pytest.param(n, marks=pytest.mark.thorough if n in TRAINED else pytest.mark.slow)
        for n in CONFIGS
    ],
)
def test_trains_a_few_steps_over_all_devices(name: str):
    config = tiny(name, "steps=3", "evaluate.batch=512").config
    outcome = jt.run(config)
    assert (outcome.status, outcome.step) == ("done", 3)
    found = read_results(outcome.directory.metrics, "")
    assert [row["skipped"] for row in found.values()] == [0, 0, 0]
    assert np.isfinite(list(outcome.results[3].values())).all()
    again = resolve(outcome.directory.config, schema=type(config)).config
    assert again == config
    loaded = load_run(config, outcome.directory.path)
    assert (loaded.experiment.predict is not None) == (config.experiment in PREDICTS)
    if loaded.experiment.predict:
        rows = {name: np.ones((5, *row.shape), row.dtype) for name, row in loaded.inputs.items()}
        assert {len(array) for array in jax.tree.leaves(loaded.predict(rows))} == {5}


@pytest.mark.slow
@pytest.mark.parametrize("name", CONFIGS)
def test_gives_one_result_however_its_batches_are_split(name: str):
    settings = "parallel={kind: single}", "precision={kind: bf16}"
    of = build_loss_case(tiny(name, *settings).config, rows=8)
    quick = {"copies": Mirrored(devices=4, impl="shard_map"), "parts": Mirrored(devices=4, zero=3)}
    report = check(
        of, {k: v for k, v in quick.items() if of.rows_interact != "batch" or k == "parts"}
    )
    assert report.ok, report.describe()
    assert not report.causes
    assert report.rows[-1].check == "parts"


@pytest.mark.thorough
@pytest.mark.parametrize("name", CURVES)
def test_takes_the_steps_of_its_golden_curve(name: str):
    golden = np.loadtxt(GOLDEN / "curves" / f"{name}.txt", usecols=1)
    assert len(golden) == 20
    assert golden[-1] < golden[0]
    words = f"if it was meant: PYTHONPATH=tests python {Path(__file__)}"
    assert_close(losses(name), golden, 1e-4, says=words)


def renew() -> None:
    """Writes the golden files."""
    for name in CONFIGS:
        (GOLDEN / "configs" / f"{name}.yaml").write_text(resolved(name))
    for name in CURVES:
        rows = [f"{step:2d}  {loss:.6f}\n" for step, loss in enumerate(losses(name), 1)]
        (GOLDEN / "curves" / f"{name}.txt").write_text("# step, loss\n" + "".join(rows))


if __name__ == "__main__":
    os.environ["JAX_PLATFORMS"] = "cpu"
    with tempfile.TemporaryDirectory() as scratch:
        os.chdir(scratch)
        renew()
