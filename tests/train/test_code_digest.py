"""The code of a run: edits are told, and pieces of other packages are named in a config."""

import functools
import importlib
import json
import shutil
import sys
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest

import jtrain as jt
from jtrain.cli import main
from jtrain.config.resolve import resolve
from jtrain.errors import ConfigError
from jtrain.train.code_digest import PYTHON, digest_code, find_edited
from jtrain.train.run_result import FINISHED

SCRIPT = """\
import functools

import jax

import own_helpers
from own_helpers import SCALE

STEPS = 100
WEIGHTS = {"a": 0.5, "b": [1.0, 2.0]}


def square(x):
    return x**2


class Penalty:
    factor = 0.1

    def __call__(self, x):
        return self.factor * square(x)


def make(power):
    @jax.jit
    def inner(x, shift=0.25):
        total = own_helpers.half(square(x) - shift) + WEIGHTS["b"][0]
        return total * SCALE + (1 if x in {"p", "q", "r"} else power)

    return inner


penalty = Penalty()
part = functools.partial(make(3), shift=0.5)
losses = [lambda params, batch, rng: make(3)(batch["x"]) + penalty(params["w"]), part]
"""
HELPERS = """\
import own_constants

SCALE = 1.0


def half(x):
    return x / own_constants.TWO
"""
FILES = {"own_script": SCRIPT, "own_helpers": HELPERS, "own_constants": "TWO = 2\n"}


def digests(folder: Path, monkeypatch, **edits: str) -> dict[str, str]:
    """Digest the loss of a script of its own folder, whose modules have other texts."""
    folder.mkdir()
    with monkeypatch.context() as patch:
        patch.syspath_prepend(folder)
        for name, text in (FILES | edits).items():
            (folder / f"{name}.py").write_text(text)
            sys.modules.pop(name, None)
        importlib.invalidate_caches()
        script = importlib.import_module("own_script")
        return digest_code(script.losses)


EDITS = {
    "a helper of the module": ("own_script", "x**2", "x**3", {"loss"}),
    "a constant in a container": ("own_script", "[1.0, 2.0]", "[1.5, 2.0]", {"loss"}),
    "a value of a closure": ("own_script", "make(3)(", "make(4)(", {"loss"}),
    "a method": ("own_script", "self.factor *", "2 * self.factor *", {"loss"}),
    "an imported constant": ("own_helpers", "SCALE = 1.0", "SCALE = 2.0", {"loss", "own_helpers"}),
    "a comment": ("own_script", "STEPS = 100", "STEPS = 100  # as before\n\n", set()),
    "what the loss does not use": ("own_script", "STEPS = 100", "STEPS = 200", set()),
}


@pytest.fixture(scope="module")
def before(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        return digests(tmp_path_factory.mktemp("code") / "first", patch)


@pytest.mark.parametrize("edit", EDITS)
def test_an_edit_is_found_and_named_by_its_piece(edit, before, tmp_path, monkeypatch):
    file, old, new, expected = EDITS[edit]
    assert FILES[file].count(old) == 1
    after = digests(tmp_path / "edited", monkeypatch, **{file: FILES[file].replace(old, new)})
    assert set(find_edited(before, after)) == expected
    assert set(before) == {"loss", "own_helpers", "own_constants", PYTHON}


def level(power):
    def loss(params, batch, rng):
        return jt.Mean.of(jnp.abs(batch["x"] - params["level"]) ** power, batch["mask"])

    return loss


@pytest.mark.thorough
def test_fit_says_that_the_loss_was_edited(tmp_path, compiled, capfd):
    how = {"optimizer": "sgd", "lr": 0.1, "batch": 8, "devices": 1, "directory": tmp_path / "run"}
    data = {"x": np.arange(8, dtype=np.float32)}
    fit = functools.partial(jt.fit, params={"level": jnp.float32(0)}, data=data, **how)
    fit(level(2), steps=2)
    assert fit(level(2), steps=2).why == FINISHED
    assert "edited" not in capfd.readouterr().out
    found = fit(level(4), steps=2)
    for words in (capfd.readouterr().out, found.why):
        assert FINISHED in words
        assert "edited since its last start: loss" in words
    fit(level(4), steps=4)
    assert "edited since its last start: loss" in capfd.readouterr().out
    fit(level(4), steps=6)
    assert "edited" not in capfd.readouterr().out, "it was said"


ADDON = Path(__file__).parent / "addon"
ENTRIES = {
    "optimizers": "signed = addon.pieces:Signed\nbroken = addon.nowhere:Gone",
    "schedules": "halved = addon.pieces:Halved",
    "strategies": "last_device = addon.pieces:LastDevice",
    "guards": "limit = addon.pieces:Limit",
    "data": "line = addon.pieces:Line",
    "models": "slope = addon.pieces:Slope",
    "verbs": "greet = addon.verb\nlost = addon.nowhere",
}
CONFIG = """
experiment: addon.study:Config
steps: 8
batch: 8
data: {kind: line, rows: 32}
model: {kind: slope}
optimizer: {kind: signed, lr: 0.1, schedule: {kind: halved}}
parallel: {kind: last_device}
guard: {kind: limit, most: 50}
trackers: [{kind: "addon.pieces:Lines"}]
log: {every: 1}
"""


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with the package and its metadata, as pip leaves them."""
    site = tmp_path_factory.mktemp("site")
    shutil.copytree(ADDON, site / "addon", ignore=shutil.ignore_patterns("__pycache__"))
    (site / "addon" / "__init__.py").touch()
    info = site / "addon-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: addon\nVersion: 1.0\n")
    groups = "\n".join(f"[jtrain.{group}]\n{lines}" for group, lines in ENTRIES.items())
    (info / "entry_points.txt").write_text(groups)
    return site


@pytest.fixture
def config(installed: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.syspath_prepend(installed)
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "line.yaml"
    path.write_text(CONFIG)
    return path


def test_a_config_names_a_piece_of_each_kind_and_resumes_with_them(config: Path):
    first = jt.run(resolve(config).config)
    assert first.step == 8
    longer = jt.run(resolve("runs/line/config.yaml", ["steps=12", "name=line"]).config)
    assert longer.step == 12
    rows = Path("runs/line/lines.jsonl").read_text().splitlines()
    assert [json.loads(row)["step"] for row in rows] == list(range(1, 13))
    stopped = jt.run(resolve(config, ["guard.most=0.001", "name=stopped"]).config)
    assert stopped.status == "failed"
    assert "the loss is too high" in stopped.why


@pytest.mark.parametrize(
    ("setting", "words"),
    [
        ("optimizer.kind=broken", "optimizer.kind=broken: addon.nowhere:Gone cannot be imported"),
        ("optimizer.kind=sined", "one of sgd, .*, signed or package.module:Name.*mean signed"),
        ("optimizer.kind=addon.pieces:Line", "addon.pieces:Line is not a @configclass over"),
        ("optimizer.kind=adon:Signed", "install its package, or put the module beside experiments"),
        ("experiment=addon.study:Gone", "no attribute 'Gone'"),
    ],
)
def test_a_mistake_names_the_key_and_what_to_write(config: Path, setting: str, words: str):
    with pytest.raises(ConfigError, match=words):
        resolve(config, [setting])


WRONG = """
import jtrain as jt

@jt.configclass
class Rule(jt.optim.OptimizerConfig):
    def rule(self): ...

@jt.configclass
class Rules(jt.optim.OptimizerConfig):
    def rules(self, decay): ...

@jt.configclass
class Fixed(jt.parallel.BaseParallelConfig):
    def build(self, among): ...

@jt.configclass
class Closed(jt.trackers.TrackerConfig):
    open = 3

"""


@pytest.mark.parametrize(
    ("key", "name", "words"),
    [
        ("optimizer", "Rule", "too many positional arguments; write `def rule(self, decay):`"),
        ("optimizer", "Rules", "has no method rule(self, decay), as optimizers have; did you mean"),
        ("parallel", "Fixed", "argument: 'among'; write `def build(self, among=None):`"),
        ("trackers", "Closed", "has no method open(self, about), as trackers have"),
    ],
)
def test_a_wrong_signature_names_the_key_and_the_signature(
    key: str, name: str, words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    (tmp_path / "wrong_kinds.py").write_text(WRONG)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "wrong_kinds", raising=False)
    kind = f"{{kind: wrong_kinds:{name}}}"
    setting = f"{key}=[{kind}]" if key == "trackers" else f"{key}.kind=wrong_kinds:{name}"
    with pytest.raises(ConfigError) as caught:
        resolve("shakespeare", [setting])
    assert str(caught.value).startswith(f"command line: {setting}: ")
    assert f"wrong_kinds:{name} has " in str(caught.value)
    assert words in str(caught.value)


def test_a_package_adds_a_verb(config: Path, capsys: pytest.CaptureFixture[str]):
    assert main(["greet", "you", "--all"]) == 3
    assert main(["--help"]) == 0
    assert main(["lost"]) == main(["gret"]) == 2
    told = capsys.readouterr()
    assert "hello you --all" in told.out
    assert "greet   of addon.verb" in told.out
    assert "addon.nowhere cannot be imported" in told.err
    assert "did you mean greet?" in told.err
