"""Redaction: removes secrets from text and values that other people may read.

A secret is known by its name (`api_key`, `--password`, `Authorization:`), by the shape that its
issuer gives it (`hf_...`, `ghp_...`), by its position (`user:password@host`), or, without a name,
by looking random. Ordinary config values stay: `num_tokens: 1000`, `use_cls_token: true`,
`pad_token: <pad>`, and digests of 32 or 64 hexadecimal digits. The 40 digits of a git commit look
like the keys of some issuers: they stay after a word that means a commit (`git`, `revision`) or in
an address of one (`/commit/`), and are hidden elsewhere.
"""

import itertools
import math
import re
from collections.abc import Mapping, Sequence
from typing import Any

from jtrain.errors.spelling import is_one_slip_from

HIDDEN = "<redacted>"

# Names of values that are always secret: the last words of a name, in lower case.
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
_AMBIGUOUS = ("token", "key", "auth")  # secret if the value is no plain word or number
# Other words are one slip away from these: mid_token, passed, rookie.
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
_ANY_NAMED = re.compile(
    rf"(?P<name>{_NAME})(?P<sign>[\"']?\s?[=:]\s?)(?P<value>{_VALUE})", re.IGNORECASE | re.ASCII
)
_HEX40 = re.compile(r"(?<![\w-])[0-9a-f]{40}(?![0-9a-z_])", re.ASCII)
# Text before or around a commit: `git 86e6...`, `revision: 86e6...`, `86e6...-dirty`.
_COMMIT = re.compile(
    r"(?:\b(?:git|commit|commits|rev|revision|sha|sha1|tree|head|hash|digest|fingerprint|version)"
    r"[\"']?\W{0,4}|[./](?:commit|commits|tree|blob|blobs|raw|resolve|snapshots)/|@)\Z",
    re.IGNORECASE,
)
_RUN = re.compile(r"[A-Za-z0-9+]{20,}")  # candidates for random text
# Values of a key or token that are no secret: `image`, `<pad>`, `params/blocks/0/qkv`, `1e-3`.
_PART = r"(?:[^\W\d_]{1,20}\d{0,4}|\d{1,6})"
_PLAIN = re.compile(
    r"[<\[({|][^\n]{0,30}[>\])}|]?|[^(\[]*[(\[].*|[\d.,e+-]*|\W{0,4}"
    rf"|[\W_]{{0,3}}{_PART}(?:[\W_]{{1,2}}{_PART})*[\W_]{{0,2}}"
)
# Words after a name in an error message: `model.secret: is no key`.
_PROSE = {
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
    """Replace each secret in a text by `<redacted>`."""
    result = _BLOCK.sub(HIDDEN, text) if "PRIVATE KEY" in text else text
    result = _HOST.sub(rf"\1{HIDDEN}@", result) if "://" in result else result
    result = _BEARER.sub(lambda m: f"{m[1]} {HIDDEN}" if _is_credential(m[2]) else m[0], result)
    result = _SHAPES.sub(HIDDEN, result)
    result = _KEY.sub(HIDDEN, result) if "key-" in result else result
    result = _NAMED.sub(_redact_named, result)
    result = _ANY_NAMED.sub(_redact_misspelled, result)
    result = _HEX40.sub(_redact_hex40, result)
    return _RUN.sub(lambda m: HIDDEN if _is_random(m[0]) else m[0], result)


def redact_values(value: Any, name: str = "") -> Any:
    """Replace secrets in a JSON value, by the names of keys and in every text.

    A list of words, such as a command line, is read as one: `["--password", "x"]` hides the x.
    """
    if isinstance(value, Mapping):
        return {key: redact_values(item, str(key)) for key, item in value.items()}
    if isinstance(value, str):
        if is_secret(name, value):
            return HIDDEN
        return value if _is_commit(name, value) else redact(value)
    if isinstance(value, Sequence) and not isinstance(value, bytes):
        previous = ["", *value][: len(value)]
        flags = [item.lstrip("-") if str(item).startswith("-") else name for item in previous]
        return [redact_values(item, flag) for item, flag in zip(value, flags, strict=True)]
    if isinstance(value, int) and not isinstance(value, bool) and _is_always_secret(name):
        return HIDDEN
    return value


def is_secret(name: str, value: str) -> bool:
    """Return whether a text is secret by its name: `api_key`, `HF_TOKEN`, `hubToken`."""
    if not value or value == HIDDEN:
        return False
    if _is_always_secret(name):
        return not re.fullmatch(r"(?i)true|false|none|null|\$\{?\w+\}?", value)
    if is_one_slip_from("_".join(_words(name)), _SLIPS):
        return not re.fullmatch(r"(?i)true|false|none|null|[\d.,e+-]*|\$\{?\w+\}?", value)
    words = _words(name)
    return bool(words) and words[-1] in _AMBIGUOUS and not _PLAIN.fullmatch(value)


def _is_always_secret(name: str) -> bool:
    joined = "_".join(_words(name))
    return any(joined == last or joined.endswith(f"_{last}") for last in _ALWAYS)


def _words(name: str) -> list[str]:
    """Split `wandbApiKey` or `WANDB-API-KEY` into wandb, api, key."""
    separated = re.sub(r"([a-z0-9])([A-Z])", r"\1_\2", name)
    return [word for word in re.split(r"[^A-Za-z0-9]+", separated.lower()) if word]


def _redact_named(match: re.Match[str]) -> str:
    name, sign, value = match["name"], match["sign"], match["value"]
    bare = value.strip("\"'")
    if not sign.strip() and not name.startswith("-"):  # prose: "the password is", "a token at"
        return match[0]
    if sign.endswith(" ") and value in _PROSE:
        return match[0]
    return f"{name}{sign}{value.replace(bare, HIDDEN)}" if is_secret(name, bare) else match[0]


def _redact_misspelled(match: re.Match[str]) -> str:
    """Hide a value whose name is one slip from that of a secret: `api_keyy=...: is no key`."""
    name, sign, value = match["name"], match["sign"], match["value"]
    bare = value.strip("\"'").rstrip(":")
    if value in _PROSE or not is_one_slip_from("_".join(_words(name)), _SLIPS):
        return match[0]
    return f"{name}{sign}{value.replace(bare, HIDDEN)}" if is_secret(name, bare) else match[0]


def _redact_hex40(match: re.Match[str]) -> str:
    """Hide 40 hexadecimal digits, unless they are a commit."""
    before, after = match.string[: match.start()], match.string[match.end() :]
    return match[0] if _COMMIT.search(before) or after.startswith("-dirty") else HIDDEN


def _is_commit(name: str, value: str) -> bool:
    return bool(_HEX40.match(value)) and len(value) < 50 and bool(_COMMIT.search(f"{name} "))


def _is_credential(text: str) -> bool:
    return len(text) >= 16 or bool(re.search(r"\d", text))


def _is_random(text: str) -> bool:
    """Return whether a text looks random: letters of both cases and digits, 20 or more.

    In a random text more than a third of the neighbours are of different classes; in names and
    words far fewer. Hexadecimal texts stay: commits, digests and ids are hexadecimal, and no
    unnamed secret is.
    """
    classes = ["d" if c.isdigit() else "u" if c.isupper() else "l" for c in text]
    if len(set(classes)) < 3:
        return False
    turns = sum(a != b for a, b in itertools.pairwise(classes))
    counts = [text.count(c) / len(text) for c in set(text)]
    bits = -sum(share * math.log2(share) for share in counts)
    return turns / (len(text) - 1) > 0.35 and bits > 3.5
