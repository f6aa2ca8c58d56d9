"""`jtrain sample`: a text sampled from a checkpoint."""
# ruff: noqa: E501  (a case reads best on a line)

import json
import shutil
import sys
from pathlib import Path

import pytest
from quick_study import CODE, YAML, at_home, trained, write_study

from jtrain.cli import main

pytestmark = pytest.mark.thorough

ROOT = Path(__file__).parents[2]
LINES = "To be, or not to be, that is the question.\nWhether 'tis nobler in the mind to suffer\n"
TINY = (
    "steps=2", "name=tiny", "batch=4", "data={kind: text, path: lines.txt, context: 8}",
    "model.context=16", "model.layers=1", "model.heads=2", "model.width=8", "evaluate.batch=64",
    "optimizer.schedule.warmup=1", "evaluate.every=0", "parallel={kind: single}",
)  # fmt: skip
OWN = CODE.replace(
    "            optimizer=self",
    '            sample=lambda *known: "a blob",\n            optimizer=self',
)


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Train a language model in a directory."""
    place = tmp_path_factory.mktemp("sampled")
    for name in ("configs", "experiments"):
        (place / name).mkdir()
        for path in (ROOT / name).glob("shakespeare.*"):
            shutil.copy(path, place / name)
    (place / "lines.txt").write_text(LINES * 20)
    with pytest.MonkeyPatch.context() as patch:
        at_home(place, patch, place / "compiled")
        trained("configs/shakespeare.yaml", *TINY)
    return place


@pytest.fixture(autouse=True)
def _home(place: Path, monkeypatch: pytest.MonkeyPatch):
    at_home(place, monkeypatch, place / "compiled")


def sampled(capfd, *words: str) -> dict:
    assert main(["sample", *words, "--json"]) == 0
    return json.loads(capfd.readouterr().out)


def test_continues_the_prompt_by_the_seed(capfd):
    words = ("tiny", "--prompt", "be", "--tokens", "30", "--temperature", "1.5")
    first, again = sampled(capfd, *words), sampled(capfd, "runs/tiny", *words[1:])
    assert first == {"run": "tiny", "step": 2, "text": first["text"]}
    assert again == {**first, "run": "runs/tiny"}
    assert first["text"].startswith("be")
    assert len(first["text"]) > 20
    assert set(first["text"]) <= set(LINES)
    assert sampled(capfd, *words, "--seed", "1")["text"] != first["text"]


def test_top_k_of_one_is_the_likeliest(capfd):
    words = ("tiny", "--prompt", "be", "--tokens", "12")
    likeliest = sampled(capfd, *words, "--temperature", "0")
    assert sampled(capfd, *words, "--top-k", "1") == likeliest
    assert sampled(capfd, *words, "--top-p", "1e-6", "--seed", "3") == likeliest


@pytest.mark.parametrize(
    ("words", "says", "mend"),
    [
        (["tiny", "--prompt", "bÆ"], "Character 'Æ' at line 1, column 2 is not among the", ["tiny", "--prompt", "b"]),
        (["tiny", "--top-p", "2"], "--top-p=2: top_p: must be a number above 0 and at most 1, found 2", ["tiny", "--top-p", "1"]),
        (["tiny", "model.width=10"], "model.width: 8 there, 10 here", ["tiny", "model.width=8"]),
    ],
)  # fmt: skip
def test_an_error_is_reported_and_the_advice_works(words, says, mend, capfd):
    assert main(["sample", *words, *([] if "--tokens" in words else ["--tokens", "0"])]) == 2
    error_text = capfd.readouterr().err
    assert says in error_text
    assert "Traceback" not in error_text
    assert main(["sample", *mend, "--tokens", "0"]) == 0


def test_an_experiment_without_a_text_is_refused_and_one_with_its_own_takes_no_prompt(
    tmp_path: Path, monkeypatch, capfd
):
    at_home(tmp_path, monkeypatch, tmp_path / "compiled")
    config = write_study(tmp_path, CODE, YAML.replace("steps: 12", "steps: 1"))
    trained(config, "evaluate.every=0", "checkpoint.every=0")
    assert main(["sample", "quick"]) == 2
    assert "experiment quick generates no text: it has no `complete`" in capfd.readouterr().err
    (tmp_path / "experiments" / "quick.py").write_text(OWN)
    monkeypatch.delitem(sys.modules, "experiments.quick")
    assert main(["sample", "quick", "--prompt", "a"]) == 2
    assert "takes no prompt: it has a `sample` and no `complete`" in capfd.readouterr().err
    assert main(["sample", "quick"]) == 0
    assert capfd.readouterr().out == "a blob\n"


def test_tasks_are_scored_with_the_models_own_tokens(place: Path, capfd):
    rows = [{"context": "To be, or not to ", "choices": ["be", "no"], "answer": "be"}] * 3
    (place / "tasks.jsonl").write_text("\n".join(map(json.dumps, rows)))
    assert main(["eval", "tiny", "--tasks", "tasks.jsonl", "--json"]) == 0
    shown = json.loads(capfd.readouterr().out)
    assert shown["step"] == 2
    assert shown["tasks"]["tasks"] == 3
    assert shown["tasks"]["nats"] > 0
