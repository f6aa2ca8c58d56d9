"""The tokenizer and the template of a GGUF file, written by the package `gguf`."""

import json
from pathlib import Path

import numpy as np
import pytest
from chat_texts import ANSWER, USER

from jtrain.config.resolve import resolve
from jtrain.data.text.bpe import train_bpe
from jtrain.data.text.chat_template import CHATML
from jtrain.data.text.conversations import Chat
from jtrain.data.text.gguf_tokenizer import read_header
from jtrain.data.text.template_file import read_template
from jtrain.data.text.tokenizer_file import read_tokenizer
from jtrain.errors import DataError
from jtrain.models.transformer import Transformer

gguf = pytest.importorskip("gguf")
MARKS = ["<|im_start|>", "<|im_end|>", "<think>"]
TEXT = "It's 1234 wörds,  and\n\n <tag>"


@pytest.fixture(name="trained", scope="module")
def _trained():
    return train_bpe(["1234 1234 It's wörds words 12 23"] * 9, vocab=270, end="<|endoftext|>")


@pytest.fixture(name="write")
def _write(tmp_path, trained):
    """Return a function that writes a GGUF file with a tokenizer, and returns its path."""

    def write(pre: str = "gpt-2", model: str = "gpt2", template: str = CHATML) -> str:
        parsed = trained.description()["tokenizer"]["model"]
        tokens = [*sorted(parsed["vocab"], key=parsed["vocab"].get), *MARKS]
        kinds = [3, *[1] * (len(tokens) - 4), 3, 3, 4]
        writer = gguf.GGUFWriter(tmp_path / "a.gguf", "llama")
        writer.add_tokenizer_model(model)
        writer.add_tokenizer_pre(pre)
        writer.add_token_list(tokens)
        writer.add_token_types(kinds)
        writer.add_token_merges([" ".join(merge) for merge in parsed["merges"]])
        writer.add_bos_token_id(0)
        writer.add_eos_token_id(len(tokens) - 2)
        writer.add_float32("llama.rope.freq_base", 1e4)
        writer.add_array("general.languages", ["en"])
        if template:
            writer.add_chat_template(template)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.close()
        return str(tmp_path / "a.gguf")

    return write


def test_is_the_tokenizer_that_was_written(write, trained):
    found = read_tokenizer(write())
    np.testing.assert_array_equal(found.encode(TEXT), trained.encode(TEXT))
    assert found.decode(found.encode(TEXT)) == TEXT
    text = f"{MARKS[0]}12{MARKS[1]}{MARKS[2]}"
    plain, marks = found.encode(text), found.encode(text, special=True)
    assert (marks >= len(trained)).tolist() == [True, *[False] * (len(marks) - 3), True, True]
    assert (plain >= len(trained)).sum() == 1  # <think> is no special token


@pytest.mark.parametrize(
    ("pre", "numbers"),
    [("gpt-2", ["1234"]), ("smollm", [*"1234"]), ("llama-bpe", ["123", "4"]), ("qwen2", [*"1234"])],
)
def test_words_are_split_as_in_llama_cpp(write, pre, numbers):
    found = read_tokenizer(write(pre))
    assert found.decode(found.encode(TEXT)) == TEXT
    parsed = found.description()["tokenizer"]
    package = pytest.importorskip("tokenizers")
    parts = package.Tokenizer.from_str(json.dumps(parsed)).pre_tokenizer.pre_tokenize_str(TEXT)
    words = [word.strip("Ġ") for word, _ in parts]
    assert [word for word in words if word.isdecimal()] == numbers


def test_chat_takes_both_where_none_is_named(tmp_path, write):
    source = CHATML.replace("<|im_end|>", "{{ eos_token }}")
    (tmp_path / "a.jsonl").write_text("\n".join([json.dumps({"messages": [USER, ANSWER]})] * 3))
    path = write(template="{{ bos_token }}" + source)
    chat = Chat(path=str(tmp_path / "a.jsonl"), context=90)
    assert chat.with_gguf("folder") is chat
    corpus = chat.with_gguf(path).build()
    row = corpus.train[np.arange(1)]
    first = row["tokens"][0]
    assert corpus.vocabulary.decode(first[row["answer"][0]][:2]) == "4<|im_end|>"
    assert first[0] == 0
    assert len(corpus.vocabulary) == 273
    own = chat.with_gguf(write(template=""))
    assert (own.template, own.tokenizer) == ("", path)
    with pytest.raises(DataError, match=r"a.gguf has no chat_template. Leave data.template out"):
        read_template(path)


def test_other_tokenizers_and_broken_files_are_refused(tmp_path, write):
    for changed in ({"model": "llama"}, {"pre": "tekken"}):
        with pytest.raises(DataError, match=r"a.gguf has the tokenizer .*FOLDER/tokenizer.json"):
            read_tokenizer(write(**changed))
    whole = (tmp_path / "a.gguf").read_bytes()
    for cut in (*range(0, len(whole) - 40, 97), len(whole) - 60):
        (tmp_path / "b.gguf").write_bytes(whole[:cut])
        with pytest.raises(DataError, match=r"b.gguf is no complete GGUF file"):
            read_header(tmp_path / "b.gguf")
    for place in range(24, 400, 3):  # any count may be wrong
        (tmp_path / "b.gguf").write_bytes(whole[:place] + b"\xff" * 8 + whole[place + 8 :])
        try:
            read_header(tmp_path / "b.gguf")
        except DataError as error:
            assert "Download it again" in str(error)  # noqa: PT017
    with pytest.raises(DataError, match=r"c.gguf cannot be read .*Name another file"):
        read_header(tmp_path / "c.gguf")


def test_a_config_with_the_file_as_model_has_both(tmp_path, monkeypatch, write):
    config = Path(__file__).parents[2] / "configs" / "chat.yaml"
    path = write()
    monkeypatch.setattr(Transformer, "read_values", lambda path: {"context": 256})
    options = [f"data.path={tmp_path}/a.jsonl", f"model={{from: {path}}}"]
    data = resolve(config, options).config.data
    assert (data.tokenizer, data.template) == (path, path)
    other = resolve(config, [*options, "data.tokenizer=t.json", "data.template=t.jinja"]).config
    assert (other.data.tokenizer, other.data.template) == ("t.json", "t.jinja")
    (tmp_path / "a.gguf").unlink()
    again = resolve(config, [*options, f"data.tokenizer={path}", f"data.template={path}"]).config
    assert again.data == data
