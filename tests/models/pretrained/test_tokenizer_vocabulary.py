"""The vocabulary of a published tokenizer, whatever the encoding of the user's locale."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from jtrain.errors import DataError
from jtrain.models.pretrained.source import vocabulary_of

READ = """
from pathlib import Path
from jtrain.models.pretrained.source import vocabulary_of
print(ascii(vocabulary_of(Path("."))))
"""


def test_a_tokenizer_is_utf8_in_any_locale(tmp_path: Path):
    tokens = {"\u0120the": 0, "gr\u00fcn": 1}
    text = json.dumps({"model": {"vocab": tokens}}, ensure_ascii=False)
    (tmp_path / "tokenizer.json").write_bytes(text.encode())
    ascii_locale = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    paths = os.pathsep.join(path for path in sys.path if path)
    environ = {**os.environ, **ascii_locale, "PYTHONPATH": paths, "JAX_PLATFORMS": "cpu"}
    command = [sys.executable, "-c", READ]
    found = subprocess.run(command, cwd=tmp_path, env=environ, capture_output=True, text=True)
    assert found.stdout.strip() == ascii(tokens), found.stderr


WILD = [
    "[" * 9999,
    "[]",
    '{"model": 3}',
    '{"model": {"vocab": 3}}',
    '{"model": {"vocab": [1]}}',
    '{"model": {"vocab": {}}, "added_tokens": [3]}',
    '{"model": {"vocab": {}}, "added_tokens": {}',
]


@pytest.mark.parametrize("text", WILD)
def test_what_is_no_tokenizer_is_refused(text: str, tmp_path: Path):
    (tmp_path / "tokenizer.json").write_text(text)
    with pytest.raises(DataError, match=r"(?s)is no tokenizer .*Download it again"):
        vocabulary_of(tmp_path)
