"""Corpus of secrets to hide, and of texts to leave unchanged.

Every secret is made up here: put together of parts, so that none stands in this file in the shape
by which scanners know it.
"""

import random
import string
from typing import NamedTuple

_rng = random.Random(7)


def noise(count: int, alphabet: str = string.ascii_letters + string.digits) -> str:
    return "".join(_rng.choice(alphabet) for _ in range(count))


HEX = "0123456789abcdef"
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
    leak("github, of an app", "{}", "ghs_" + noise(36)),
    leak("github, fine-grained", "{} was refused", "github_pat_" + noise(22) + "_" + noise(59)),
    leak("gitlab", "ci {}.", "glpat-" + noise(20)),
    leak("openai", "({})", "sk-" + noise(48)),
    leak("openai, of a project", "<{}>", "sk-proj-" + noise(48)),
    leak("anthropic", "{}", "sk-ant-api03-" + noise(90)),
    leak("stripe", "paid with {}", "sk_live_" + noise(24)),
    leak("aws", "{} may not read s3://bucket", "AKIA" + noise(16, UPPER)),
    leak("aws, for a session", "{}", "ASIA" + noise(16, UPPER)),
    leak("google", "GET /v1?x={}", "AIza" + noise(35)),
    leak("google, of a person", "{}", "ya29." + noise(60)),
    leak("google, of a client", "{}", "GOCSPX-" + noise(28)),
    leak("slack", "posted by {}", "xoxb-" + "-".join((noise(11), noise(11), noise(24)))),
    leak("npm", "{}", "npm_" + noise(36)),
    leak("pypi", "upload: {}", "pypi-" + noise(80)),
    leak("json web token", "{}", "eyJ" + noise(30) + "." + noise(50) + "." + noise(43)),
    leak("nvidia", "{}", "nvapi-" + noise(60)),
    leak("replicate", "{}", "r8_" + noise(37)),
    leak("databricks", "by {}", "dapi" + noise(32, HEX)),
    leak("databricks, of a workspace", "{}", "dapi" + noise(32, HEX) + "-2"),
    leak("digitalocean", "{} was refused", "dop_v1_" + noise(64, HEX)),
    leak("digitalocean, refreshed", "{}", "dor_v1_" + noise(64, HEX)),
    leak("mailgun", "api:{}", "key-" + "4f" + noise(30, HEX)),
    leak("sendgrid", "{}", "SG." + noise(22) + "." + noise(43)),
    leak("twilio", "{}", "SK" + noise(32, HEX)),
    leak("groq", "{}", "gsk_" + noise(52)),
    leak("xai", "{}", "xai-" + noise(80)),
    leak("linear", "{}", "lin_api_" + noise(40)),
    leak("notion", "{}", "ntn_" + noise(46)),
    leak("grafana", "{}", "glsa_" + noise(32) + "_" + noise(8, HEX)),
    leak("vault", "{}", "hvs." + noise(90)),
    leak("40 hexadecimal digits, of weights and biases", "{}", noise(40, HEX)),
    leak("40 hexadecimal digits in a sentence", "logged in with {}, refused", noise(40, HEX)),
    leak("40 hexadecimal digits as a value", "data.path={}", noise(40, HEX)),
    leak("a private key", "key file:\n{}\ndone",
         "-----BEGIN RSA PRIVATE" + " KEY-----\n" + noise(60) + "\n-----END RSA PRIVATE KEY-----"),
    leak("a private key that is cut off", "{}", "-----BEGIN PRIVATE" + " KEY-----\n" + noise(60)),
]  # fmt: skip

# Secrets by their name.
NAMED = [
    leak("an argument", "jtrain run x.yaml model.api_key={}", noise(20)),
    leak("an option", "--password {}", "correct-horse"),
    leak("an option with a sign", "--password={}", "correct-horse"),
    leak("a variable", "WANDB_API_KEY={}", noise(40, "0123456789abcdef")),
    leak("a variable of aws", "AWS_SECRET_ACCESS_KEY={}", noise(40)),
    leak("a variable of hugging face", "HF_TOKEN={}", noise(12)),
    leak("a line of YAML", "password: {}", "hunter2"),
    leak("a line of YAML in quotes", "password: '{}'", "hunter2 and more"),
    leak("a quoted text with a space", 'secret: "{}"', "two words"),
    leak("JSON", '{{"client_secret": "{}"}}', noise(16)),
    leak("a Python dict", "{{'api_key': '{}'}}", "abc-123-def"),
    leak("camel case", "wandbApiKey={}", noise(20)),
    leak("with hyphens", "x-api-key: {}", noise(20)),
    leak("a header", "Authorization: Bearer {}", noise(24)),
    leak("a basic header", "authorization: Basic {}", "dXNlcjpodW50ZXIy"),
    leak("a bearer alone", "sent Bearer {} to the server", noise(24)),
    leak("a query", "https://host/run?token={}&x=1", noise(24)),
    leak("a cookie", "Cookie: {}", "session1234567"),
    leak("a key that is no word", "key={}", "a1b2c3d4e5f6"),
    leak("a token that is no word", "token: {}", "a1b2c3d4e5f6"),
    leak("an access token", "access_token={}", "abcdefgh"),
    leak("a passphrase", "passphrase = {}", "swordfish"),
    leak("azure", "AccountKey={};EndpointSuffix=core", noise(60)),
    leak("misspelt, a letter too many", "data.api_keyy={}: is no key of data", noise(20)),
    leak("misspelt, plain", "data.pasword={}: is no key of data", "hunter2"),
    leak("misspelt, swapped", "toy.yaml:3: model.secert: {}", "hunter2"),
    leak("misspelt, another letter", "tracker.authorisation={}", "abcd-efgh"),
    leak("misspelt, of two words", "trackers.acess_token='{}'", "two words"),
    leak("an error", "ConnectionError: login failed (user=me, password=hunter2{})", "hunter2"),
    leak("a traceback", "  File 'x.py', line 3\n    connect(password='{}')", "hunter2"),
]  # fmt: skip

# Secrets by their position.
PLACES = [
    leak("a server", "uri: https://me:{}@mlflow.example.org", "hunter2"),
    leak("a data base", "postgresql+psycopg2://jtrain:{}@db:5432/runs", "p4ssw0rd"),
    leak("a password with signs", "redis://:{}@cache:6379/0", "a+b=c!"),
    leak("a token for a user", "git clone https://{}@host.example.org/x", noise(20)),
    leak("drawn, and nothing said", "the server answered {} and closed", noise(32)),
    leak("drawn, long", "{}", noise(64)),
]

LEAKS = [*SHAPES, *NAMED, *PLACES]

# Texts that must not change.
KEPT = [
    "num_tokens: 1000",
    "tokens=2048",
    "use_cls_token: true",
    "use_cls_token=false",
    "key_dim: 64",
    "model.key_size=128",
    "pad_token: <pad>",
    "cls_token: [CLS]",
    "eos_token: </s>",
    "bos_token: <|endoftext|>",
    "image_key: image",
    "sort_key=length",
    "label_key: labels/fine",
    "key: params/blocks/0/qkv/kernel",
    "'key': 'params/blocks/3/mixture/router'",
    "fold_in(key, step)",
    "KeyError: 'loss'",
    "tokenizer: runs/tok-32k/tokenizer.json",
    "token 5 of 1000 is no word",
    "tokens by byte-bpe 3f2a9c7d0e1b4a5f",
    "key=jax.random.key(0)",
    "optimizer.lr=1e-3",
    "toy.yaml:3: secret: is no key; the keys are experiment, steps",
    "toy.yaml:3: trackers.0.password: must be text, found 3",
    "git 86e6eb376ab3d4c30ea99db12117bd326bb6a220",
    "commit 86e6eb376ab3d4c30ea99db12117bd326bb6a220 of jtrain",
    "86e6eb376ab3d4c30ea99db12117bd326bb6a220-dirty",
    "revision: 86e6eb376ab3d4c30ea99db12117bd326bb6a220",
    "'git': '86e6eb376ab3d4c30ea99db12117bd326bb6a220'",
    "model@86e6eb376ab3d4c30ea99db12117bd326bb6a220",
    "https://host.example.org/jtrain/commit/86e6eb376ab3d4c30ea99db12117bd326bb6a220",
    "hub/models--gpt2/snapshots/86e6eb376ab3d4c30ea99db12117bd326bb6a220/vocab.json",
    "fingerprint 86e6eb376ab3d4c30ea99db12117bd326bb6a220",
    "mid_token: yes",
    "bid_token=yes",
    "secrete: 3",
    "sort-key-differences",
    "key-differences2",
    "optimizer.rate=1e-3 optimizer.kind=adamw",
    "model.width=64, data.path=runs/texts2/tokens",
    "xxh3-128 9b1deb4d3b7d4bad9bdd2b0d7b3dcb6d",
    "9b1deb4d-3b7d-4bad-9bdd-2b0d7b3dcb6d",
    "sha256:" + "0123456789abcdef" * 4,
    "step   400/2000  loss   2.1432  valid   2.2011  lr 9.80e-04   52.1k tokens/s",
    "s3://bucket/runs/2026-11-22T04-59-00Z/checkpoints/400",
    "https://docs.jax.dev/en/latest/301/vjp-objects.html#key=3",
    "ssh://git@host.example.org/jtrain.git",
    "http://127.0.0.1:8080/index.html",
    "someone@example.org",
    "TransformerDecoderLayerWithRotaryPositions2",
    "float32[8,1024,50257]{2,1,0}",
    "--xla_force_host_platform_device_count=8",
    "events.out.tfevents.1795323540.host-0.1234.0",
    "/home/someone/experiments/configs/shakespeare.yaml",
    "the password is asked for at the prompt",
]
