"""scripts/tpu_vm.sh by its dry run, and the benchmark for a GPU at toy size on the CPU."""

import json
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import jax
import pytest
from plain_environ import SAID

from jtrain.distributed.manifests.machines import TPUS

ROOT = Path(__file__).parent.parent.parent
SCRIPT = ROOT / "benchmarks" / "gpu"
IMAGES = {"jax", "numpy"}  # what an image with JAX has


@pytest.fixture
def modules(monkeypatch):
    """The script's own modules, gone afterwards."""
    monkeypatch.syspath_prepend(str(SCRIPT))
    monkeypatch.syspath_prepend(str(SCRIPT.parent))
    before = set(sys.modules)
    yield __import__
    for name in set(sys.modules) - before:
        if str(SCRIPT) in str(getattr(sys.modules[name], "__file__", "")):
            del sys.modules[name]


def rehearse(folder: Path, *parts: str) -> tuple[int, dict, str]:
    """Return the exit code, the JSON and the table of some parts."""
    command = [sys.executable, str(SCRIPT), "--rehearse", "--out", str(folder / "gpu")]
    run = subprocess.run([*command, "--parts", *parts], capture_output=True, text=True, check=False)
    found = json.loads((folder / "gpu.json").read_text())
    return run.returncode, found, (folder / "gpu.md").read_text()


def test_the_requirements_are_what_an_image_lacks():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]
    lines = (ROOT / "benchmarks" / "gpu-requirements.txt").read_text().splitlines()
    listed = {line for line in lines if line and not line.startswith("#")}
    named = lambda line: re.split(r"[<>=]", line)[0]
    ours = {line for line in project if named(line) not in IMAGES}
    assert ours <= listed
    assert {named(line) for line in listed - ours} == {"torch"}


@pytest.mark.thorough
@pytest.mark.parametrize(("kind", "millions"), [("gpt2", 124), ("llama", 1100)])
def test_the_models_have_the_sizes_that_they_say(modules, kind, millions):
    from jtrain.config.resolve import resolve

    size = modules("sizes").LANGUAGE["full"][kind]
    config = resolve(ROOT / "configs" / "gpt2.yaml", size.words()).config
    model = config.model.build()
    params = jax.eval_shape(lambda: model.init(jax.random.key(0))[0])
    count = sum(leaf.size for leaf in jax.tree.leaves(params))
    assert abs(count / 1e6 - millions) < 0.01 * millions


def test_a_failed_part_leaves_the_others_their_rows(modules):
    report = modules("report")
    row = {"what": "jtrain", "value": 123456.0, "unit": "tokens/s"}
    parts = {
        "gpt2-xla": {"title": "A", "failed": "out of memory"},
        "cnn": {"title": "B", "rows": [row], "notes": ["PYTORCH SKIPPED"]},
    }
    page = report.markdown({"environment": report.environment(True), "parts": parts})
    assert "out of memory" in page
    assert "| jtrain | 1.235e+05 | tokens/s |" in page
    assert "**PYTORCH SKIPPED**" in page
    assert "its numbers mean nothing" in page


@pytest.mark.slow
def test_all_parts_are_rehearsed(tmp_path):
    parts = re.findall(r'^    "([\w-]+)": "', (SCRIPT / "__main__.py").read_text(), re.MULTILINE)
    assert len(parts) == 15
    code, found, page = rehearse(tmp_path, *parts)
    assert code == 0, page
    assert re.search(r"date \d{4}-\d\d-\d\d .*jax \d", page)
    for name in ("gpt2-fp8", "cnn"):
        assert found["parts"][name]["rows"][0]["what"] == "jtrain"
        assert found["parts"][name]["rows"][0]["value"] > 0
    kill = found["parts"]["kill"]["rows"]
    assert [row["value"] for row in kill] == [6, "True"]


def tpu_vm(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(["bash", str(ROOT / "scripts" / "tpu_vm.sh"), *words], **SAID)


@pytest.mark.parametrize("kind", ["v5e", "v6e"])
def test_a_dry_run_prints_what_makes_uses_and_deletes_a_slice(kind):
    slice = ("--zone", "europe-west4-b", "--type", f"{TPUS[kind].vm}-16", "--spot")
    words = ("run", "configs/gpt2.yaml", "name=a b")
    done = tpu_vm("one", *slice, "--nfs", "10.0.0.2:/share", "--dry-run", *words)
    assert done.returncode == 0, done.stderr
    verbs = re.findall(r"^\+ gcloud compute tpus \S+ (\w+)", done.stderr, re.MULTILINE)
    assert verbs == ["create", "scp", "ssh", "ssh", "ssh", "ssh", "scp", "delete"]
    assert f"--runtime-version={TPUS[kind].runtime} --spot" in done.stderr
    assert "sudo mount -t nfs '10.0.0.2:/share' runs" in done.stderr
    assert "jtrain-env/bin/jtrain run configs/gpt2.yaml name=a\\ b" in done.stderr
