"""`jtrain launch --engine`: what it prints, and what it refuses before anything is started."""

import re
import shlex
import subprocess

import pytest
from ruamel.yaml import YAML

from jtrain.cli import main

GIVEN = ["--image", "registry/jtrain:1", "--claim", "shared"]
RUN = ["run", "configs/gpt2.yaml", "data.path=data/web", "parallel.kind=fsdp"]


@pytest.fixture(autouse=True)
def _from_the_top(monkeypatch: pytest.MonkeyPatch, pytestconfig):
    monkeypatch.chdir(pytestconfig.rootpath)


def launch(*words: str) -> int:
    return main(["launch", *words])


def test_it_prints_a_manifest_and_how_to_start_it(capsys):
    words = ["--engine", "k8s", "--topology", "h100:8", *GIVEN, "--restarts", "3", "--queue", "lab"]
    words += ["--select", "nvidia.com/gpu.product=NVIDIA-H100-80GB-HBM3", *RUN, "microbatches=6"]
    assert launch(*words) == 0
    shown = capsys.readouterr()
    manifest = YAML(typ="safe").load(shown.out)
    assert manifest["metadata"] == {"name": "gpt2", "labels": {"kueue.x-k8s.io/queue-name": "lab"}}
    assert manifest["spec"]["failurePolicy"]["maxRestarts"] == 3
    pod = manifest["spec"]["replicatedJobs"][0]["template"]["spec"]["template"]["spec"]
    assert pod["nodeSelector"] == {"nvidia.com/gpu.product": "NVIDIA-H100-80GB-HBM3"}
    assert pod["containers"][0]["command"] == ["jtrain", *RUN, "microbatches=6"]
    assert pod["terminationGracePeriodSeconds"] == 30  # checkpoint.grace, and 5
    assert "jtrain starts nothing on a cluster" in shown.err
    # The line that it advises prints the same, and nothing beside.
    line = re.search(r"jtrain (launch .*) > gpt2\.yaml", shown.err)
    assert line, shown.err
    assert main(shlex.split(line[1])) == 0
    again = capsys.readouterr()
    below = lambda text: text.partition("apiVersion")[2]
    assert (below(again.out), again.err) == (below(shown.out), "")


def test_the_name_follows_from_the_run(capsys):
    words = ["--engine", "trainjob", "--topology", "v5e:4x4", "--print", *GIVEN]
    assert launch(*words, "run", "configs/llama2_7b.yaml") == 0
    documents = list(YAML(typ="safe").load_all(capsys.readouterr().out))
    assert [each["metadata"]["name"] for each in documents] == ["llama2-7b"] * 2


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--processes", "3"], "takes no --processes; leave it out, or type --engine local"),
        (["--topology="], "the machines are missing. Write --topology v5e:4x4"),
        (["--restarts", "-1"], "--restarts is at least 0"),
        (["--spot"], "k8s takes no --spot; leave it out, or type --engine skypilot"),
        (["--select", "a"], "--select a is not KEY=VALUE"),
        (["--engine", "skypilot", "--select", "a=b"], "leave it out, or type --engine k8s"),
        (["--engine", "trainjob", "--in-place", "a"], "leave it out, or type --engine k8s"),
        (["--engine", "local"], "local takes no --claim; leave it out, or type --engine k8s"),
        # The config has 480 rows in 30 microbatches.
        (["--topology", "v5e:4x8"], "v5e:4x8 has 32 devices. batch: 480 rows do not divide"),
        (["run", "configs/gpt2.yaml", "data.path=x", "parallel.kind=single"],
         "kind=single uses 1 of them. Write parallel.kind=fsdp"),
        (["run", "configs/gpt2.yaml", "data.path=x", "parallel.kind=sharded", "parallel.tensor=3"],
         "h100:8 has 8 devices. parallel: tensor 3 = 3 shards"),
        (["run", "configs/gpt2.yaml", "data.path=x", "parallel.devices=4"],
         "uses 4 of them.* parallel.devices=0"),
        (["eval", "gpt2"], "a manifest is for the verb run, found eval"),
    ],
)  # fmt: skip
def test_what_does_not_fit_is_refused_with_what_to_type(words, said, capsys):
    """The last of an option counts, so that each row changes one thing."""
    given = ["--engine", "k8s", "--topology", "h100:8", *GIVEN]
    verbs = [] if {"run", "eval"} & {*words} else RUN
    assert launch(*given, *words, *verbs) == 2
    shown = capsys.readouterr()
    assert re.search(said, shown.err), shown.err
    assert not shown.out


def test_options_of_the_verb_are_its_own(capsys):
    words = ["--engine", "k8s", "--topology", "h100:8", *GIVEN, "--print"]
    assert launch(*words, *RUN, "--overfit", "8") == 0
    assert "parallel.kind=fsdp, --overfit, '8']" in capsys.readouterr().out


def test_nothing_is_started(monkeypatch, capsys):
    monkeypatch.setattr(subprocess, "Popen", None)
    words = ["--engine", "skypilot", "--topology", "2*h100:8", "--claim", "10.0.0.2:/share"]
    assert launch(*words, "--spot", "--print", *RUN, "microbatches=30") == 0
    assert "use_spot: true" in capsys.readouterr().out
