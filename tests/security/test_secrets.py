"""No secret is written: by name, shape or position; other text is unchanged.

Every secret is made up here: put together of parts, so that none stands in this file in the shape
by which scanners know it.
"""

import io
import json
import random
import string
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

from toy_study import write_study

from jtrain.cli import main
from jtrain.config.dump import dump, to_plain
from jtrain.config.resolve import resolve
from jtrain.io.log import LOG, RunLog
from jtrain.io.redact import HIDDEN, is_secret, redact, redact_values
from jtrain.train.resume import match_config
from jtrain.train.run_dir import RunDir

_rng = random.Random(7)


def noise(count: int, alphabet: str = string.ascii_letters + string.digits) -> str:
    return "".join(_rng.choice(alphabet) for _ in range(count))


UPPER = string.ascii_uppercase + string.digits


class Leak(NamedTuple):
    name: str
    text: str
    secret: str  # the part of the text that must be hidden


def leak(name: str, text: str, secret: str) -> Leak:
    return Leak(name, text.format(secret), secret)


# Secrets by the shape of their issuer, without a name.
SHAPES = [
    leak("hugging face", "downloading with {} from the hub", "hf_" + noise(34)),
    leak("github", "cloned by {}", "ghp_" + noise(36)),
    leak("github, fine-grained", "{} was refused", "github_pat_" + noise(22) + "_" + noise(59)),
    leak("gitlab", "ci {}.", "glpat-" + noise(20)),
    leak("openai", "({})", "sk-" + noise(48)),
    leak("anthropic", "{}", "sk-ant-api03-" + noise(90)),
    leak("aws", "{} may not read s3://bucket", "AKIA" + noise(16, UPPER)),
    leak("google", "GET /v1?x={}", "AIza" + noise(35)),
    leak("slack", "posted by {}", "xoxb-" + "-".join((noise(11), noise(11), noise(24)))),
    leak("json web token", "{}", "eyJ" + noise(30) + "." + noise(50) + "." + noise(43)),
    leak("a private key", "key file:\n{}\ndone",
         "-----BEGIN RSA PRIVATE" + " KEY-----\n" + noise(60) + "\n-----END RSA PRIVATE KEY-----"),
]  # fmt: skip

# Secrets by their name.
NAMED = [
    leak("an argument", "jtrain run x.yaml model.api_key={}", noise(20)),
    leak("an option", "--password {}", "correct-horse"),
    leak("a variable", "WANDB_API_KEY={}", noise(40, "0123456789abcdef")),
    leak("a quoted text with a space", 'secret: "{}"', "two words"),
    leak("JSON", '{{"client_secret": "{}"}}', noise(16)),
    leak("a Python dict", "{{'api_key': '{}'}}", "abc-123-def"),
    leak("camel case", "wandbApiKey={}", noise(20)),
    leak("a header", "Authorization: Bearer {}", noise(24)),
    leak("a query", "https://host/run?token={}&x=1", noise(24)),
    leak("a cookie", "Cookie: {}", "session1234567"),
    leak("a token that is not a word", "token: {}", "a1b2c3d4e5f6"),
    leak("azure", "AccountKey={};EndpointSuffix=core", noise(60)),
    leak("a traceback", "  File 'x.py', line 3\n    connect(password='{}')", "hunter2"),
]  # fmt: skip

# Secrets by their position.
PLACES = [
    leak("a server", "uri: https://me:{}@mlflow.example.org", "hunter2"),
    leak("a data base", "postgresql+psycopg2://jtrain:{}@db:5432/runs", "p4ssw0rd"),
    leak("a password with signs", "redis://:{}@cache:6379/0", "a+b=c!"),
    leak("a token for a user", "git clone https://{}@host.example.org/x", noise(20)),
]

LEAKS = [*SHAPES, *NAMED, *PLACES]

# Texts that must not change.
KEPT = [
    "num_tokens: 1000", "use_cls_token: true", "key_dim: 64", "pad_token: <pad>",
    "label_key: labels/fine", "'key': 'params/blocks/3/mixture/router'", "fold_in(key, step)",
    "KeyError: 'loss'", "tokens by byte-bpe 3f2a9c7d0e1b4a5f", "key=jax.random.key(0)",
    "optimizer.lr=1e-3", "toy.yaml:3: secret: is not a key; the keys are experiment, steps",
    "bid_token=yes", "sha256:" + "0123456789abcdef" * 4,
    "step   400/2000  loss   2.1432  valid   2.2011  lr 9.80e-04   52.1k tokens/s",
    "s3://bucket/runs/2026-11-22T04-59-00Z/checkpoints/400",
    "https://docs.jax.dev/en/latest/301/vjp-objects.html#key=3",
    "ssh://git@host.example.org/jtrain.git", "--xla_force_host_platform_device_count=8",
    "the password is asked for at the prompt",
]  # fmt: skip


def test_secrets_in_the_files_of_a_run_are_hidden(tmp_path: Path):
    for case in LEAKS:
        there, screen = RunDir(tmp_path / case.name), io.StringIO()
        there.path.mkdir()
        there.write_status("failed", why=case.text, argv=["jtrain", "run", "x.yaml", case.text])
        with RunLog(screen) as run:
            run.open(there.log)
            LOG.info(case.text)
        facts = json.loads(there.status.read_text())
        assert facts["argv"][:3] == ["jtrain", "run", "x.yaml"]
        assert HIDDEN in facts["why"], case
        written = there.status.read_text() + there.log.read_text() + screen.getvalue()
        assert case.secret not in written, case.name
        assert json.dumps(case.secret)[1:-1] not in written, case.name
        assert redact(facts["why"]) == facts["why"]


def test_text_without_secrets_is_unchanged():
    assert [redact(text) for text in KEPT] == KEPT
    assert redact_values({"why": KEPT, "betas": [-1, 0.5]}) == {"why": KEPT, "betas": [-1, 0.5]}


def test_values_are_hidden_by_the_names_of_their_keys():
    said = lambda secret, number: {
        "password": secret,
        "pin": {"password": number, "use_cls_token": True, "num_tokens": 10},
        "wandb": {"apiKey": secret, "project": "mine"},
        "argv": ["jtrain", "--password", secret, "--steps", "3"],
        "none": {"password": "", "secret": None, "token": "null"},
        "from": {"api_key": "${WANDB_API_KEY}"},
    }
    assert redact_values(said("short", 1234)) == said(HIDDEN, HIDDEN)
    assert not is_secret("num_tokens", "a1b2c3d4e5")


def test_the_stored_config_has_no_secret_and_the_run_resumes(tmp_path):
    path = write_study(tmp_path)
    secret = "https://me:hunter2@host"
    config = resolve(path, [f"model.title={json.dumps(secret)}"]).config
    assert config.model.title == secret, "the run itself uses it"
    there = RunDir(tmp_path / "run")
    there.begin(config)
    there.write_status("running", step=1)
    assert "hunter2" not in there.config.read_text() + dump(to_plain(config))
    assert match_config(there, config, "").changed == []


def test_output_of_the_command_line_has_no_secret(tmp_path, capsys):
    path = str(write_study(tmp_path))
    secret = "ghp_" + noise(36)
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
