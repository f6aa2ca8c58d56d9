"""Pieces of another package are named in a config, by its entry points or by their module."""

import json
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

import jtrain as jt
from jtrain.config.resolve import resolve
from jtrain.errors import ConfigError

ADDON = Path(__file__).parent / "addon"
ENTRIES = {
    "optimizers": "signed = addon.pieces:Signed\nbroken = addon.nowhere:Gone",
    "schedules": "halved = addon.pieces:Halved",
    "strategies": "last_device = addon.pieces:LastDevice",
    "guards": "limit = addon.pieces:Limit",
    "data": "line = addon.pieces:Line",
    "models": "slope = addon.pieces:Slope",
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
    """Return a folder into which pip has installed the package."""
    folder = tmp_path_factory.mktemp("addon")
    wheel = folder / "addon-1.0-py3-none-any.whl"
    groups = "\n".join(f"[jtrain.{group}]\n{lines}" for group, lines in ENTRIES.items())
    tag = "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
    files = {
        "METADATA": "Metadata-Version: 2.1\nName: addon\nVersion: 1.0\n",
        "WHEEL": tag,
        "entry_points.txt": groups,
        "RECORD": "",
    }
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr("addon/__init__.py", "")
        for path in ADDON.glob("*.py"):
            archive.writestr(f"addon/{path.name}", path.read_text())
        for name, text in files.items():
            archive.writestr(f"addon-1.0.dist-info/{name}", text)
    command = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--no-index"]
    subprocess.run([*command, "--target", folder / "site", wheel], check=True, timeout=300)
    return folder / "site"


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
    stopped = jt.run(resolve(config, ["guard.limit=0.001", "name=stopped"]).config)
    assert stopped.status == "failed"
    assert "the loss is too high" in stopped.why


@pytest.mark.parametrize(
    ("setting", "words"),
    [
        ("optimizer.kind=broken", "optimizer.kind=broken: addon.nowhere:Gone cannot be imported"),
        ("optimizer.kind=sined", "one of sgd, .*, signed or package.module:Name.*mean signed"),
        ("optimizer.kind=addon.pieces:Line", "addon.pieces:Line is no @configclass over"),
        ("optimizer.kind=addon.pieces:Sined", "no attribute 'Sined'"),
        ("optimizer.kind=adon:Signed", "install its package, or put the module beside experiments"),
        ("optimizer.clap=1", "is no key of optimizer; it has kind, lr.* mean optimizer.clip"),
        ("data.rows=many", "data.rows=many: must be a whole number"),
        ("experiment=addon.study:Gone", "no attribute 'Gone'"),
    ],
)
def test_a_mistake_names_the_key_and_what_to_write(config: Path, setting: str, words: str):
    with pytest.raises(ConfigError, match=words):
        resolve(config, [setting])
