"""Redaction: removes secrets from text and values that other people may read.

A secret is known by its name (`api_key`, `--password`, `Authorization:`), by the shape that its
issuer gives it (`hf_...`, `ghp_...`), or by its position (`user:password@host`). Ordinary config
values stay: `num_tokens: 1000`, `use_cls_token: true`, `pad_token: <pad>`.
"""

import re
from collections.abc import Mapping, Sequence
from typing import Any

HIDDEN = "<redacted>"

# Last words of the names of values that are always secret.
_NAMES = (
    "password", "passwd", "passphrase", "pwd", "secret", "secrets", "credential", "credentials",
    "authorization", "cookie", "apikey", "api_key", "access_key", "secret_key", "private_key",
    "signing_key", "encryption_key", "account_key", "auth_key", "service_key", "auth_token",
    "access_token", "refresh_token", "bearer_token", "session_token", "id_token", "hf_token",
    "hub_token", "github_token",
)  # fmt: skip
_AMBIGUOUS = ("token", "key", "auth")  # secret if the value is not a plain word or number
_SHAPES = (
    r"hf_[A-Za-z0-9]{16,}",  # Hugging Face
    r"gh[pousr]_[A-Za-z0-9]{20,}|github_pat_[A-Za-z0-9_]{20,}",  # GitHub
    r"glpat-[A-Za-z0-9_-]{16,}",  # GitLab
    r"wandb_v1_[A-Za-z0-9_]{16,}",  # Weights & Biases
    r"sk-[A-Za-z0-9_-]{16,}",  # OpenAI, Anthropic
    r"(?:AKIA|ASIA)[A-Z0-9]{16}",  # AWS
    r"AIza[A-Za-z0-9_-]{30,}|ya29\.[A-Za-z0-9_.-]{16,}|GOCSPX-[A-Za-z0-9_-]{16,}",  # Google
    r"xox[abeoprs]-[A-Za-z0-9-]{10,}",  # Slack
    r"eyJ[A-Za-z0-9_-]{8,}\.[A-Za-z0-9_-]{8,}(?:\.[A-Za-z0-9_-]*)?",  # JSON web tokens
    r"-----BEGIN [A-Z0-9 ]*PRIVATE KEY-----[\s\S]*?(?:-----END [A-Z0-9 ]*PRIVATE KEY-----|\Z)",
)

_SHAPE = re.compile(rf"(?<![A-Za-z0-9])(?:{'|'.join(_SHAPES)})")
_HOST = re.compile(r"(\b[a-z][a-z0-9+.-]{0,20}://)([^\s/@:\"']*:[^\s/@\"']+|[^\s/@:\"']{8,})@")
_BEARER = re.compile(
    r"\b(Bearer|Basic)\s+(?=\S*\d|\S{16})[A-Za-z0-9+/=._~-]{8,}", re.IGNORECASE | re.ASCII
)
_LAST = {name.rpartition("_")[2] for name in _NAMES}
_NAMED = re.compile(
    rf"(?P<name>(?<![A-Za-z0-9_.-])[A-Za-z0-9_.-]{{0,64}}(?:{'|'.join({*_LAST, *_AMBIGUOUS})}))"
    r"(?P<sign>[\"']?\s?[=:]\s?(?:(?:Bearer|Basic|Token)\s+)?|\s+(?=[^-\s]))"
    r"(?P<value>\"(?:[^\"\\\n]|\\.)*\"|'[^'\n]*'|[^\s,;&\"'}\])]+)",
    re.IGNORECASE | re.ASCII,
)
_PART = r"(?:[^\W\d_]{1,20}\d{0,4}|\d{1,6})"
# Values of a key or token that are not a secret.
_PLAIN = re.compile(
    rf"""
    [<\[({{|][^\n]{{0,30}}[>\])}}|]?  # <pad>
    | [^(\[]*[(\[].*  # a call or an index
    | [\d.,e+-]*  # 1e-3
    | \W{{0,4}}
    | [\W_]{{0,3}}{_PART}(?:[\W_]{{1,2}}{_PART})*[\W_]{{0,2}}  # image, params/blocks/0/qkv
    """,
    re.VERBOSE,
)
# Words after a name in an error message: `model.secret: is not a key`.
_PROSE = {
    "a", "an", "and", "are", "as", "by", "cannot", "does", "found", "had", "has", "how", "if",
    "in", "is", "it", "must", "needs", "no", "none", "not", "of", "one", "only", "or", "that",
    "the", "this", "to", "was", "what", "when", "where", "which", "write",
}  # fmt: skip


def redact(text: str) -> str:
    """Replace each secret in a text by `<redacted>`."""
    result = _SHAPE.sub(HIDDEN, text)
    result = _HOST.sub(rf"\1{HIDDEN}@", result) if "://" in result else result
    result = _BEARER.sub(rf"\1 {HIDDEN}", result)
    return _NAMED.sub(_redact_named, result)


def redact_values(value: Any, name: str = "") -> Any:
    """Replace secrets in a JSON value, by the names of keys and in every text.

    A list of words, such as a command line, is read as one: `["--password", "x"]` hides the x.
    """
    if isinstance(value, Mapping):
        return {key: redact_values(item, str(key)) for key, item in value.items()}
    if isinstance(value, str):
        return HIDDEN if is_secret(name, value) else redact(value)
    if isinstance(value, Sequence) and not isinstance(value, bytes):
        previous = ["", *value][: len(value)]
        is_flag = lambda item: isinstance(item, str) and item.startswith("-")
        flags = [item.lstrip("-") if is_flag(item) else name for item in previous]
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
    words = _words(name)
    return bool(words) and words[-1] in _AMBIGUOUS and not _PLAIN.fullmatch(value)


def _is_always_secret(name: str) -> bool:
    joined = "_".join(_words(name))
    return any(joined == last or joined.endswith(f"_{last}") for last in _NAMES)


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
