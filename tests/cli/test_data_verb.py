"""`jtrain data` writes token files, and shows the rows that a run would train on."""

import json
import struct
import sys
import zlib
from pathlib import Path

import pytest

from jtrain.cli import main
from jtrain.data.text.token_files import TokenFiles

STUDY = """
from typing import Annotated, Literal
import jax.numpy as jnp
import numpy as np
from pydantic import Field
import jtrain as jt
from jtrain.data import Arrays, Shuffled
from jtrain.data.text.corpora import Corpus
from jtrain.data.text.corpora import Tokens

@jt.configclass
class Images:
    kind: Literal["images"] = "images"
    shape: tuple[int, ...] = (4, 4, 1)

    def build(self):
        count = int(np.prod(self.shape))
        image = np.arange(9 * count, dtype=np.float32).reshape(9, *self.shape)
        return Arrays(image=image, label=np.arange(9))

@jt.configclass
class Config(jt.RunConfig):
    data: Annotated[Tokens | Images, Field(discriminator="kind")] = Images()

    def build(self, place):
        data = self.data.build()
        source = data.train if isinstance(data, Corpus) else data
        return jt.Experiment(
            init=lambda key: ({}, ()),
            loss=lambda params, batch, rng: jnp.zeros(()),
            train=Shuffled(source, size=self.batch),
            optimizer=self.optimizer.build(self.steps),
        )
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(sys, "path", list(sys.path))
    (tmp_path / "experiments").mkdir()
    name = f"rows_{abs(hash(str(tmp_path))) % 10**8}"
    (tmp_path / "experiments" / f"{name}.py").write_text(STUDY, encoding="utf-8")
    said = f"experiment: {name}\nsteps: 4\nbatch: 2\noptimizer: {{kind: sgd, lr: 0.1}}\n"
    (tmp_path / "c.yaml").write_text(said, encoding="utf-8")
    lines = ["Exeunt.", "A sennet is sounded.", "Enter\tthe ghost.", "He dies."]
    (tmp_path / "a.txt").write_text("\n".join(lines), encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_text_is_prepared_and_reported(folder: Path, capsys):
    assert main(["data", "prepare", "a.txt", "--by", "line", "--out", "out"]) == 0
    said = capsys.readouterr().out
    assert said == "out: 55 tokens of 4 documents, by bytes 1b5ec18e7563 of 257 tokens\n"
    words = ["--tokenizer", "out/tokenizer.json", "--out", "two", "--json"]
    assert main(["data", "prepare", "a.txt", *words]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["tokenizer"] == TokenFiles("out").header["tokenizer"]
    assert (found["tokens"], found["documents"], found["kind"]) == (55, 1, "bytes")


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["a.txt"], "write jtrain data prepare a.txt --out DIR"),
        (["a.txt", "--out", "x", "--tokenizer", "byte"], "did you mean bytes"),
        (["a.txt", "--out", "x", "--vocab", "300"], "--tokenizer bpe --vocab 300"),
    ],
)
def test_invalid_arguments_of_prepare_are_refused(folder, capsys, words, says):
    assert main(["data", "prepare", *words]) == 2
    assert says in capsys.readouterr().err
    assert not (folder / "x").exists()


def test_rows_of_text_are_shown_with_their_ends(folder: Path, capsys):
    assert main(["data", "prepare", "a.txt", "--by", "line", "--out", "out"]) == 0
    capsys.readouterr()
    rows = ["data.path=out", "data.context=40", "data.pack=true", "data.validation=0.16"]
    words = ["data", "show", "c.yaml", "data.kind=tokens", *rows, "batch=2"]
    assert main(words) == 0
    said = capsys.readouterr().out
    assert "tokens    int32 [41]" in said
    assert "tokenizer bytes 1b5ec18e7563, 257 tokens" in said
    lines = [line[5:] for line in said.split("\n\n")[-1].splitlines()]
    assert sorted(lines) == [
        "A sennet is sounded.⏐Enter\\tthe ghost." + "·" * 3,
        "Exeunt." + "·" * 33,
    ]
    assert main([*words, "--json", "--rows", "1"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["arrays"]["segments"] == {"dtype": "int32", "shape": [2, 41]}
    assert found["rows"][0] in lines
    assert found["tokenizer"] == "1b5ec18e7563"


def test_images_are_written(folder: Path, capsys):
    assert main(["data", "show", "c.yaml", "--rows", "2"]) == 0
    said = capsys.readouterr().out
    assert "image     float32 [4, 4, 1]" in said
    assert "label " in said
    assert main(["data", "show", "c.yaml", "--out", "rows.png"]) == 0
    data = (folder / "rows.png").read_bytes()
    assert struct.unpack(">II", data[16:24]) == (9, 4)
    body = data[data.index(b"IDAT") + 4 : data.index(b"IEND") - 8]
    assert len(zlib.decompress(body)) == 4 * (1 + 9)
