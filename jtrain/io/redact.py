"""Text and values without the secrets in them: for whatever is written where others may read it.

A secret is known by the name that it goes by (`api_key`, `--password`, `Authorization:`), by the
shape that its issuer gave it (`hf_...`, `ghp_...`), by its place (`user:password@host`), or, where
nothing names it, by looking drawn at random. What a config is full of stays: `num_tokens: 1000`,
`use_cls_token: true`, `pad_token: <pad>`, digests, which are 32 or 64 hexadecimal digits. The 40 of
a git commit look like some issuers' keys: they stay where a commit is meant, by a word before them
(`git`, `revision`) or their place in an address (`/commit/`), and are hidden elsewhere.
"""

import itertools
import math
import re
from collections.abc import Mapping, Sequence
from typing import Any

from jtrain.errors.spelling import is_one_slip_from

HIDDEN = "<redacted>"

# What is secret whatever its value is; the last words of a name, all in lower case.
_ALWAYS = (
    "password",
    "passwd",
    "passphrase",
    "pwd",
    "secret",
    "secrets",
    "credential",
    "credentials",
    "authorization",
    "apikey",
    "api_key",
    "access_key",
    "secret_key",
    "private_key",
    "signing_key",
    "encryption_key",
    "account_key",
    "auth_key",
    "service_key",
    "auth_token",
    "access_token",
    "refresh_token",
    "bearer_token",
    "session_token",
    "id_token",
    "hf_token",
    "hub_token",
    "github_token",
    "secret_access_key",
    "client_secret",
    "cookie",
)
_PERHAPS = ("token", "key", "auth")  # secret if the value is no plain word or number
# One slip away from these are other words: mid_token, passed, rookie.
_WORDS_AWAY = {"id_token", "hf_token", "passwd", "cookie"}
_SLIPS = tuple(name for name in _ALWAYS if name not in _WORDS_AWAY)

_NAME = r"(?<![A-Za-z0-9_.-])[A-Za-z0-9_.-]{0,64}"
_VALUE = r"(\"(?:[^\"\\\n]|\\.)*\"|'[^'\n]*'|[^\s,;&\"'}\])]+)"
_NAMED = re.compile(
    rf"(?P<name>{_NAME}(?:{'|'.join((*_ALWAYS[:9], 'key', 'token', 'auth', 'cookie'))}))"
    rf"(?P<sign>[\"']?\s?[=:]\s?(?:(?:Bearer|Basic|Token)\s+)?|\s+(?=[^-\s]))(?P<value>{_VALUE})",
    re.IGNORECASE | re.ASCII,
)
_BEARER = re.compile(r"\b(Bearer|Basic)\s+([A-Za-z0-9+/=._~-]{8,})", re.IGNORECASE)
_HOST = re.compile(r"(\b[a-z][a-z0-9+.-]{0,20}://)([^\s/@:\"']*:[^\s/@\"']+|[^\s/@:\"']{8,})@")
_BLOCK = re.compile(
    r"-----BEGIN [A-Z0-9 ]*PRIVATE KEY-----.*?(?:-----END [A-Z0-9 ]*PRIVATE KEY-----|\Z)", re.DOTALL
)
_SHAPES = re.compile(
    r"(?<![A-Za-z0-9])(?:"
    r"hf_[A-Za-z0-9]{16,}|api_org_[A-Za-z0-9]{16,}"  # Hugging Face
    r"|gh[pousr]_[A-Za-z0-9]{20,}|github_pat_[A-Za-z0-9_]{20,}"  # GitHub
    r"|glpat-[A-Za-z0-9_-]{16,}"  # GitLab
    r"|sk-[A-Za-z0-9_-]{16,}|[sr]k_(?:live|test)_[A-Za-z0-9]{16,}"  # OpenAI, Anthropic; Stripe
    r"|(?:AKIA|ASIA|ABIA|ACCA)[A-Z0-9]{16}"  # AWS
    r"|AIza[A-Za-z0-9_-]{30,}|ya29\.[A-Za-z0-9_.-]{16,}|GOCSPX-[A-Za-z0-9_-]{16,}"  # Google
    r"|xox[abeoprs]-[A-Za-z0-9-]{10,}"  # Slack
    r"|npm_[A-Za-z0-9]{30,}|pypi-[A-Za-z0-9_-]{16,}"
    r"|eyJ[A-Za-z0-9_-]{8,}\.[A-Za-z0-9_-]{8,}(?:\.[A-Za-z0-9_-]*)?"  # JSON web tokens
    r"|dapi[0-9a-f]{32}(?:-\d)?|do[opr]_v1_[A-Za-z0-9]{16,}"  # Databricks, DigitalOcean
    r"|SG\.[A-Za-z0-9_-]{16,}\.[A-Za-z0-9_-]{16,}|SK[0-9a-f]{32}"  # SendGrid, Twilio
    r"|gsk_[A-Za-z0-9]{20,}|xai-[A-Za-z0-9]{20,}|pplx-[A-Za-z0-9]{20,}"  # Groq, xAI, Perplexity
    r"|lin_api_[A-Za-z0-9]{16,}|ntn_[A-Za-z0-9]{20,}|ATATT3[A-Za-z0-9_=-]{20,}"
    r"|glsa_[A-Za-z0-9_]{20,}|hvs\.[A-Za-z0-9_-]{20,}"  # Grafana, Vault
    r"|wandb_v1_[A-Za-z0-9_]{16,}|r8_[A-Za-z0-9]{20,}|nvapi-[A-Za-z0-9_-]{20,}"
    r")"
)
_KEY = re.compile(r"(?<![\w-])key-(?=[a-z]*\d)[A-Za-z0-9]{16,}(?![\w-])", re.ASCII)  # Mailgun
_SPELT = re.compile(
    rf"(?P<name>{_NAME})(?P<sign>[\"']?\s?[=:]\s?)(?P<value>{_VALUE})", re.IGNORECASE | re.ASCII
)
_FORTY = re.compile(r"(?<![\w-])[0-9a-f]{40}(?![0-9a-z_])", re.ASCII)
# What is said before a commit, or around it: `git 86e6...`, `revision: 86e6...`, `86e6...-dirty`.
_COMMIT = re.compile(
    r"(?:\b(?:git|commit|commits|rev|revision|sha|sha1|tree|head|hash|digest|fingerprint|version)"
    r"[\"']?\W{0,4}|[./](?:commit|commits|tree|blob|blobs|raw|resolve|snapshots)/|@)\Z",
    re.IGNORECASE,
)
_RUN = re.compile(r"[A-Za-z0-9+]{20,}")  # which may have been drawn at random
# What a key or token may be and is no secret: `image`, `<pad>`, `params/blocks/0/qkv`, `1e-3`.
_PART = r"(?:[^\W\d_]{1,20}\d{0,4}|\d{1,6})"
_PLAIN = re.compile(
    r"[<\[({|][^\n]{0,30}[>\])}|]?|[^(\[]*[(\[].*|[\d.,e+-]*|\W{0,4}"
    rf"|[\W_]{{0,3}}{_PART}(?:[\W_]{{1,2}}{_PART})*[\W_]{{0,2}}"
)
# What follows a name in an error message: `model.secret: is no key`.
_SAID = {
    *(
        "a",
        "an",
        "and",
        "are",
        "as",
        "by",
        "cannot",
        "does",
        "found",
        "had",
        "has",
        "how",
        "if",
        "in",
    ),
    *("is", "it", "must", "needs", "no", "none", "not", "of", "one", "only", "or", "that", "the"),
    *("this", "to", "was", "what", "when", "where", "which", "write"),
}


def redact(text: str) -> str:
    """The text, with `<redact>` in the place of each secret in it."""
    found = _BLOCK.sub(HIDDEN, text) if "PRIVATE KEY" in text else text
    found = _HOST.sub(rf"\1{HIDDEN}@", found) if "://" in found else found
    found = _BEARER.sub(lambda m: f"{m[1]} {HIDDEN}" if _drawn_or_long(m[2]) else m[0], found)
    found = _SHAPES.sub(HIDDEN, found)
    found = _KEY.sub(HIDDEN, found) if "key-" in found else found
    found = _NAMED.sub(_named, found)
    found = _SPELT.sub(_misspelt, found)
    found = _FORTY.sub(_forty, found)
    return _RUN.sub(lambda m: HIDDEN if _drawn(m[0]) else m[0], found)


def redact_values(value: Any, name: str = "") -> Any:
    """What JSON has, without secrets: by the names of keys, and in every text.

    A list of words, a command line say, is read as one: `["--password", "x"]` hides the x.
    """
    if isinstance(value, Mapping):
        return {key: redact_values(each, str(key)) for key, each in value.items()}
    if isinstance(value, str):
        if is_secret(name, value):
            return HIDDEN
        return value if _is_commit(name, value) else redact(value)
    if isinstance(value, Sequence) and not isinstance(value, bytes):
        before = ["", *value][: len(value)]
        flags = [each.lstrip("-") if str(each).startswith("-") else name for each in before]
        return [redact_values(each, flag) for each, flag in zip(value, flags, strict=True)]
    if isinstance(value, int) and not isinstance(value, bool) and _always(name):
        return HIDDEN
    return value


def is_secret(name: str, value: str) -> bool:
    """Whether a text is one by the name that it goes by: `api_key`, `HF_TOKEN`, `hubToken`."""
    if not value or value == HIDDEN:
        return False
    if _always(name):
        return not re.fullmatch(r"(?i)true|false|none|null|\$\{?\w+\}?", value)
    if is_one_slip_from("_".join(_words(name)), _SLIPS):
        return not re.fullmatch(r"(?i)true|false|none|null|[\d.,e+-]*|\$\{?\w+\}?", value)
    words = _words(name)
    return bool(words) and words[-1] in _PERHAPS and not _PLAIN.fullmatch(value)


def _always(name: str) -> bool:
    joined = "_".join(_words(name))
    return any(joined == last or joined.endswith(f"_{last}") for last in _ALWAYS)


def _words(name: str) -> list[str]:
    """`wandbApiKey` and `WANDB-API-KEY` are wandb, api, key."""
    parted = re.sub(r"([a-z0-9])([A-Z])", r"\1_\2", name)
    return [word for word in re.split(r"[^A-Za-z0-9]+", parted.lower()) if word]


def _named(match: re.Match[str]) -> str:
    name, sign, value = match["name"], match["sign"], match["value"]
    bare = value.strip("\"'")
    if not sign.strip() and not name.startswith("-"):  # prose: "the password is", "a token at"
        return match[0]
    if sign.endswith(" ") and value in _SAID:
        return match[0]
    return f"{name}{sign}{value.replace(bare, HIDDEN)}" if is_secret(name, bare) else match[0]


def _misspelt(match: re.Match[str]) -> str:
    """A value whose name is that of a secret but for one slip: `api_keyy=...: is no key`."""
    name, sign, value = match["name"], match["sign"], match["value"]
    bare = value.strip("\"'").rstrip(":")
    if value in _SAID or not is_one_slip_from("_".join(_words(name)), _SLIPS):
        return match[0]
    return f"{name}{sign}{value.replace(bare, HIDDEN)}" if is_secret(name, bare) else match[0]


def _forty(match: re.Match[str]) -> str:
    """40 hexadecimal digits: hidden, unless a commit is meant."""
    before, after = match.string[: match.start()], match.string[match.end() :]
    return match[0] if _COMMIT.search(before) or after.startswith("-dirty") else HIDDEN


def _is_commit(name: str, value: str) -> bool:
    return bool(_FORTY.match(value)) and len(value) < 50 and bool(_COMMIT.search(f"{name} "))


def _drawn_or_long(text: str) -> bool:
    return len(text) >= 16 or bool(re.search(r"\d", text))


def _drawn(text: str) -> bool:
    """Whether it looks drawn at random from letters of both cases and digits, 20 or more.

    Of such a text more than a third of the neighbours are of different classes; of names and words
    far fewer. Hexadecimal is left: commits, digests and identities are, and no secret that is not
    named.
    """
    classes = ["d" if c.isdigit() else "u" if c.isupper() else "l" for c in text]
    if len(set(classes)) < 3:
        return False
    turns = sum(a != b for a, b in itertools.pairwise(classes))
    counts = [text.count(c) / len(text) for c in set(text)]
    bits = -sum(share * math.log2(share) for share in counts)
    return turns / (len(text) - 1) > 0.35 and bits > 3.5
