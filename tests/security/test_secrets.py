"""No secret is written: by name, shape, position or randomness; other text is unchanged."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import secrets_corpus as corpus
from toy_study import write_study

from jtrain.cli import main
from jtrain.config.dump import dump, to_plain
from jtrain.config.resolve import resolve
from jtrain.io.redact import HIDDEN, is_secret, redact, redact_values
from jtrain.train.hooks.log import LogLines
from jtrain.train.run_dir import RunDir

LEAKS, KEPT = corpus.LEAKS, corpus.KEPT


def test_the_corpus_is_as_large_as_the_page_says_and_has_no_duplicates():
    assert len(LEAKS) + len(KEPT) >= 80
    page = Path(__file__).parents[2] / "docs/reliability.md"
    assert f"| {len(LEAKS)} and {len(KEPT)} | `tests/security/test_secrets.py`" in page.read_text()
    assert len({case.name for case in LEAKS}) == len(LEAKS)
    assert len(set(KEPT)) == len(KEPT)
    assert all(case.secret in case.text for case in LEAKS)


@pytest.mark.parametrize("case", LEAKS, ids=[case.name for case in LEAKS])
def test_secrets_in_a_text_are_hidden(case):
    found = redact(case.text)
    assert HIDDEN in found
    for part in case.secret.split():
        assert part not in found or len(part) < 6, found  # `KEY-----` of a block's frame
    assert redact(found) == found


@pytest.mark.parametrize("text", KEPT)
def test_text_without_secrets_is_unchanged(text):
    assert redact(text) == text
    assert redact_values({"why": [text]}) == {"why": [text]}


@pytest.mark.parametrize("case", LEAKS, ids=[case.name for case in LEAKS])
def test_secrets_in_the_files_of_a_run_are_hidden(case, tmp_path: Path):
    there, lines = RunDir(tmp_path / "run"), []
    there.path.mkdir()
    there.write_status("failed", why=case.text, argv=["jtrain", "run", "x.yaml", case.text])
    LogLines(there.log, screen=lines.append).print(case.text)
    written = there.status.read_text() + there.log.read_text() + "".join(lines)
    assert json.loads(there.status.read_text())["argv"][:3] == ["jtrain", "run", "x.yaml"]
    assert case.secret not in written
    assert json.dumps(case.secret)[1:-1] not in written


def test_values_are_hidden_by_the_names_of_their_keys():
    said = {
        "password": "x",
        "pin": {"password": 1234, "use_cls_token": True, "num_tokens": 10},
        "wandb": {"apiKey": "short", "project": "mine"},
        "argv": ["jtrain", "--password", "x", "--steps", "3"],
        "none": {"password": "", "secret": None, "token": "null"},
        "from": {"api_key": "${WANDB_API_KEY}"},
    }
    found = redact_values(said)
    assert found == {
        "password": HIDDEN,
        "pin": {"password": HIDDEN, "use_cls_token": True, "num_tokens": 10},
        "wandb": {"apiKey": HIDDEN, "project": "mine"},
        "argv": ["jtrain", "--password", HIDDEN, "--steps", "3"],
        "none": {"password": "", "secret": None, "token": "null"},
        "from": {"api_key": "${WANDB_API_KEY}"},
    }
    assert not is_secret("num_tokens", "a1b2c3d4e5")


def test_random_texts_are_detected_and_names_in_the_code_are_not():
    drawn = [corpus.noise(32) for _ in range(2000)]
    missed = [text for text in drawn if redact(text) == text]
    assert len(missed) <= 20, missed  # 0.4 % (10,000 of 32 letters and digits, measured)
    root = Path(__file__).parents[2]
    for path in [*(root / "jtrain").rglob("*.py"), *(root / "configs").glob("*.yaml")]:
        if path.name in {"redact.py", "adam.py"}:  # names of secrets; an address drawn at random
            continue
        for number, line in enumerate(path.read_text().splitlines(), 1):
            assert redact(line) == line, f"{path}:{number}"


def test_the_stored_config_has_no_secret_and_the_run_resumes(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "path", list(sys.path))
    path = write_study(tmp_path)
    secret = "https://me:hunter2@host"
    config = resolve(path, [f"model.title={json.dumps(secret)}"]).config
    assert config.model.title == secret, "the run itself uses it"
    there = RunDir(tmp_path / "run")
    there.begin(config)
    there.write_status("running", step=1)
    assert "hunter2" not in there.config.read_text() + dump(to_plain(config))
    assert there.match(config, "").changed == []


def test_output_of_the_command_line_has_no_secret(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(sys, "path", list(sys.path))
    path = str(write_study(tmp_path))
    secret = "ghp_" + corpus.noise(36)
    assert main(["show", path, f"model.title={secret}"]) == 0
    assert main(["show", path, "--json", f"model.title={secret}"]) == 0
    assert main(["show", path, f"steps={secret}"]) == 2
    assert main(["show", path, f"{secret}=3"]) == 2
    assert main([secret]) == 2
    to_plain = capsys.readouterr()
    assert to_plain.out.count(HIDDEN) == 2
    assert secret not in to_plain.out + to_plain.err


def test_a_crash_of_the_command_line_shows_no_secret(tmp_path):
    code = (
        "import jtrain.cli as cli, sys, types\n"
        "def main(argv): raise RuntimeError('no answer from https://me:hunter2@host')\n"
        "sys.modules['jtrain.cli.show'] = types.SimpleNamespace(main=main)\n"
        "sys.exit(cli.main(['show']))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300)
    assert done.returncode == 70
    assert "no answer from" in done.stderr
    assert "Traceback" in done.stderr
    assert "hunter2" not in done.stderr
