"""Additions by supervision and by reward: a step is repeated, and a run resumed, bit for bit."""

import json
from pathlib import Path

import jax
import numpy as np
import published_models as published
import pytest
from plain_environ import run_and_kill
from quick_study import config_of, kept, state_of, trained
from tiny_configs import TINY

from jtrain.checkpoint.layout import list_named_steps
from jtrain.cli import main
from jtrain.core.placement import Unplaced
from jtrain.errors import DataError
from jtrain.train.hooks.log import read_results

CONFIGS = Path(__file__).parents[2] / "configs"
SINGLE = ("parallel={kind: single}",)
ONE_DIGIT = (*SINGLE, "data={digits: 1, validation: 16}", "model.width=32", "batch=16")
FEW = (*TINY["grpo"], *SINGLE, "policy.updates=2", "policy.beta=0.1", "steps=6")


def test_the_rows_are_right_sums_of_which_none_is_in_both_sets():
    config = config_of(CONFIGS / "additions.yaml")
    task = config.data.build()
    seen = []
    for rows in (task.train.arrays, task.valid.arrays):
        asked = [task.vocabulary.decode(x) for x in rows["question"]]
        answers = [task.vocabulary.decode(x).partition("\n")[0] for x in rows["answer"]]
        for question, answer in zip(asked, answers, strict=True):
            a, b = question.rstrip("=").split("+")
            assert (len(a), len(b), int(a) + int(b)) == (2, 2, int(answer))
        seen.append(set(asked))
    assert not seen[0] & seen[1]
    assert [len(x) for x in seen] == [7100, 1000]


def test_a_right_answer_is_rewarded_up_to_its_end_alone():
    from experiments.additions import right_answers

    answer = np.array([[4, 6, 0, 0]], np.int32)  # 0 ends it
    given = np.array([[[4, 6, 0, 9], [4, 6, 9, 0], [4, 0, 0, 0], [4, 6, 0, 0]]], np.int32)
    got = jax.jit(lambda x, y: right_answers(x, {"answer": y}, 0))(given, answer)
    np.testing.assert_array_equal(got, [[1, 0, 0, 1]])


@pytest.mark.thorough
def test_a_step_is_replayed_with_the_bits_of_its_rollouts(capsys):
    outcome = trained(CONFIGS / "grpo.yaml", *FEW, "checkpoint.every=2", "checkpoint.keep=9")
    for step, start in ((5, 4), (6, 4)):  # the first samples answers, the second learns from them
        capsys.readouterr()
        code = main(["replay", "grpo", "--step", f"{step}", "--json"])
        found = json.loads(capsys.readouterr().out)
        assert (code, found["start"], found["other"]) == (0, start, None)
        assert found["replayed"] == found["recorded"]
    assert found["checkpoint"] == [], "the rollouts are leaves of the checkpoint"
    before, rollouts = (state_of(outcome.directory, n).extra["rollouts"] for n in (4, 6))
    asked = config_of(outcome.directory.config).build(Unplaced()).train[4]["question"]
    np.testing.assert_array_equal(rollouts["question"], asked)  # those of step 5
    assert (np.asarray(rollouts["answers"]) != np.asarray(before["answers"])).any()
    assert "'" in (outcome.directory.path / "samples.txt").read_text()


@pytest.mark.thorough
def test_killed_it_resumes_to_the_same_bits(tmp_path):
    settings = (*FEW, "steps=30", "checkpoint.every=3", "evaluate.every=0", "log.every=1")
    whole = trained(CONFIGS / "grpo.yaml", *settings, "name=whole")
    unbroken = kept(whole)
    checkpoints = Path("runs/grpo/checkpoints")
    saved = lambda: max(list_named_steps(checkpoints), default=0)
    run_and_kill(lambda: saved() >= 6, str(CONFIGS / "grpo.yaml"), *settings)
    again = trained(CONFIGS / "grpo.yaml", *settings)
    assert again.step == 30
    assert "resumes from step" in again.directory.log.read_text()
    assert kept(again) == unbroken


@pytest.mark.thorough
def test_reward_raises_the_accuracy_that_supervision_reached():
    settings = (*TINY["additions"], *ONE_DIGIT, "data.questions=0", "evaluate.batch=16")
    fast = "optimizer.schedule={kind: constant, warmup: 0}", "checkpoint.every=0"
    first = trained(CONFIGS / "additions.yaml", *settings, *fast, "steps=300", "optimizer.lr=3e-3")
    settings = (*TINY["grpo"], *ONE_DIGIT, "data.questions=0", "evaluate.batch=16")
    start = f"init_from={{path: {first.directory.path}}}"
    more = trained(CONFIGS / "grpo.yaml", *settings, *fast, start, "steps=60", "log.every=1")
    rewards = [row["reward"] for row in read_results(more.directory.metrics, "").values()]
    assert 0.05 < np.mean(rewards[:5]) < 0.95
    assert np.mean(rewards[-10:]) > np.mean(rewards[:5]) + 0.03


def test_a_published_model_of_another_tokenizer_is_refused(tmp_path):
    published.write_model(tmp_path / "hf", published.golden("llama31"))
    words = {"model": {"type": "WordLevel", "vocab": {"a": 0}, "unk_token": "a"}}
    (tmp_path / "hf" / "tokenizer.json").write_text(json.dumps(words))
    with pytest.raises(DataError, match=r"another kind than.*Set data.tokenizer="):
        config_of(CONFIGS / "grpo.yaml", [f"model={{from: {tmp_path / 'hf'}}}"]).build(Unplaced())
