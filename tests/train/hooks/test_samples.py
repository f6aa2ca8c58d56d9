import os

import counting

from jtrain.train.hooks import Samples


def test_samples_are_written_each_under_its_step(tmp_path):
    told = []
    samples = Samples(
        tmp_path / "samples.txt",
        every=2,
        sample=lambda state: f"at {float(state)}\nÆ",
        log=lambda step, text: told.append((step, text)),
    )
    counting.run([samples], stop=5)
    assert (tmp_path / "samples.txt").read_text(encoding="utf-8") == (
        "=== step 2 ===\nat 2.0\nÆ\n\n=== step 4 ===\nat 4.0\nÆ\n\n"
    )
    assert told == [(2, "at 2.0\nÆ"), (4, "at 4.0\nÆ")]


def test_a_killed_run_has_after_its_resume_the_samples_of_one_never_killed(tmp_path, monkeypatch):
    monkeypatch.setattr(os, "fsync", lambda _: None)  # many files
    path = tmp_path / "samples.txt"
    text = lambda state: f"=== step 1 ===\nwhat a model says: {float(state)}"  # it may say anything
    counting.run([Samples(path, every=2, sample=text)], stop=8)
    whole = path.read_bytes()
    for cut in range(whole.index(b"=== step 6 ==="), len(whole) + 1):
        path.write_bytes(whole[:cut])
        counting.run([Samples(path, every=2, sample=text, resumed_at=4)], start=4, stop=8)
        assert path.read_bytes() == whole
    counting.run([Samples(path, every=2, sample=text)], stop=8)
    assert path.read_bytes() == whole


def test_an_invalid_unicode_text_breaks_nothing(tmp_path):
    samples = Samples(tmp_path / "samples.txt", every=1, sample=lambda state: "\udc80")
    counting.run([samples], stop=1)
    assert (tmp_path / "samples.txt").read_text() == "=== step 1 ===\n?\n\n"
