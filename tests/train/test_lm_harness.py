"""The adapter of lm-eval, against its own HFLM on transformers with the same weights."""

import json
import types

import jax
import pytest
from comparison import assert_close
from published_models import read_weights

from jtrain.data.text.tokenizers import train_bpe
from jtrain.models.pretrained.source import PretrainedWeights
from jtrain.parallel import Single
from jtrain.train import make_complete
from jtrain.train.loaded_run import LoadedRun

for module in ("lm_eval", "transformers", "torch"):
    pytest.importorskip(module, reason="pip install 'jtrain[lm-eval,transformers]'")

pytestmark = [
    pytest.mark.thorough,
    pytest.mark.filterwarnings("ignore"),  # other libraries' own
]

END = "<|endoftext|>"
TEXT = "to be or not to be, that is the question: whether it is nobler in the mind to suffer. "
PAIRS = [
    (TEXT, "to sleep"),
    ("to be ", "or not"),  # the space belongs to what follows
    ("", "whether it is"),
    (12 * TEXT, " no more"),  # longer than the context
    (f"the mind{END}", "to be"),
]


def write_llama(folder):
    """Write a small Llama with drawn weights, and its tokenizer; return the tokenizer."""
    import torch
    import transformers
    from tokenizers import Tokenizer

    tokenizer = train_bpe([TEXT], vocab=280, end=END)
    folder.mkdir()
    pieces = Tokenizer.from_str(jax.tree.map(str, tokenizer._build().to_str()))
    transformers.PreTrainedTokenizerFast(
        tokenizer_object=pieces, bos_token=END, eos_token=END
    ).save_pretrained(folder)
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=len(tokenizer), hidden_size=32, intermediate_size=64, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=64,
        initializer_range=0.3, bos_token_id=tokenizer.end, eos_token_id=tokenizer.end,
    )  # fmt: skip
    transformers.LlamaForCausalLM(config).save_pretrained(folder)
    return tokenizer


def load_published(path, tokenizer) -> LoadedRun:
    """Return published weights as a loaded run."""
    source = PretrainedWeights(path)
    params, _ = read_weights(source)
    complete = make_complete(source.model.build, tokenizer)
    experiment = types.SimpleNamespace(model=source.model.build(), complete=complete, adapter=None)
    return LoadedRun(
        directory=path, step=0, params=params, extra={}, config=None, experiment=experiment,  # pyright: ignore
        _program=None, _strategy=Single().build(),
    )  # fmt: skip


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """Return lm-eval's model of a folder, and ours."""
    from lm_eval.models.huggingface import HFLM

    from jtrain.train.lm_harness import JtrainLM

    folder = tmp_path_factory.mktemp("lm") / "llama"
    tokenizer = write_llama(folder)
    theirs = HFLM(pretrained=str(folder), device="cpu", dtype="float32", batch_size=2)
    return theirs, JtrainLM(load_published(folder, tokenizer), batch_size=4)


def requests(kind, *arguments):
    from lm_eval.api.instance import Instance

    return [Instance(kind, {}, each, i) for i, each in enumerate(arguments)]


def test_scores_are_those_of_transformers(models):
    theirs, ours = models
    assert (ours.max_length, ours.eot_token_id) == (theirs.max_length, theirs.eot_token_id)
    beginnings = [TEXT[:n] for n in range(5, 25)]
    how = {"max_gen_toks": 1}
    written = theirs.generate_until(requests("generate_until", *[(x, how) for x in beginnings]))
    # Half a character is written too, which is no text.
    greedy = [x for x in zip(beginnings, written, strict=True) if x[1] and x[1].isascii()]
    assert greedy, "another seed would write a text"
    asked = requests("loglikelihood", *PAIRS, greedy[0])
    want, got = theirs.loglikelihood(asked), ours.loglikelihood(asked)
    assert_close([x for x, _ in got], [x for x, _ in want], 1e-5)
    assert [y for _, y in got] == [y for _, y in want]
    assert {y for _, y in got} == {True, False}


def test_texts_longer_than_the_context_are_scored_in_windows(models):
    texts = requests("loglikelihood_rolling", (12 * TEXT,), (TEXT,), ("to",))
    theirs, ours = (model.loglikelihood_rolling(texts) for model in models)
    assert_close(ours, theirs, 1e-5)


def test_texts_are_written_up_to_a_mark(models):
    asked = [
        (TEXT, {"until": [" "], "max_gen_toks": 12}),
        (5 * TEXT, {"until": ["q", "e"], "max_gen_toks": 12}),
        ("to", {"until": [], "max_gen_toks": 5}),
    ]
    theirs, ours = (model.generate_until(requests("generate_until", *asked)) for model in models)
    assert ours == theirs


def test_a_task_of_the_harness_takes_it(models, tmp_path):
    import lm_eval
    from lm_eval.tasks import TaskManager

    rows = [{"q": "to be or not to", "choices": [" be", " sleep"], "gold": 0}] * 3
    (tmp_path / "rows.json").write_text(json.dumps(rows))
    (tmp_path / "tiny.yaml").write_text(
        f"""
task: tiny
dataset_path: json
dataset_kwargs: {{data_files: {{test: {tmp_path}/rows.json}}}}
test_split: test
output_type: multiple_choice
doc_to_text: "{{{{q}}}}"
doc_to_choice: "{{{{choices}}}}"
doc_to_target: gold
metric_list: [{{metric: acc}}]
"""
    )
    found = [
        lm_eval.simple_evaluate(
            model=model,
            tasks=["tiny"],
            task_manager=TaskManager(include_path=str(tmp_path), include_defaults=False),
            bootstrap_iters=0,
        )["results"]["tiny"]["acc,none"]
        for model in models
    ]
    assert found[0] == found[1]
