"""`jtrain data` writes token files, and shows the rows that a run would train on."""

import json
import struct
import zlib
from pathlib import Path

import pytest
from image_files import write_fashion_mnist

from jtrain.cli import main
from jtrain.data.text.token_files import TokenFiles


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
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
    words = ["data", "show", "gpt2", *rows, "model.context=40", "batch=2", "microbatches=1"]
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


def test_images_are_written(folder: Path, monkeypatch: pytest.MonkeyPatch, capsys):
    write_fashion_mnist(folder / "fashion-mnist", train=8, test=2)
    monkeypatch.setenv("JTRAIN_DATA", str(folder))
    words = ["data", "show", "fashion_mnist", "batch=2", "data.validation=0"]
    assert main([*words, "--rows", "2"]) == 0
    said = capsys.readouterr().out
    assert "image     uint8 [28, 28, 1]" in said
    assert "label " in said
    assert main([*words, "--out", "rows.png"]) == 0
    data = (folder / "rows.png").read_bytes()
    assert struct.unpack(">II", data[16:24]) == (2 * 28 + 1, 28)
    body = data[data.index(b"IDAT") + 4 : data.index(b"IEND") - 8]
    assert len(zlib.decompress(body)) == 28 * (1 + 2 * 28 + 1)
