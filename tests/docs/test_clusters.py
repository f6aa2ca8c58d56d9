"""Pages of docs/clusters: the variables that they set identify every process."""

import re
import shlex
import subprocess
from pathlib import Path

import pytest
from plain_environ import SAID
from ruamel.yaml import YAML

from jtrain.cli import main
from jtrain.distributed.cluster import detect
from jtrain.distributed.cluster.tls import AUTHORITY, CERTIFICATE, KEY

PAGES = Path(__file__).parents[2] / "docs" / "clusters"
LINK = re.compile(r"\]\((clusters/[^)#]+)")


def blocks(page: str, language: str) -> list[str]:
    text = (PAGES / f"{page}.md").read_text()
    return re.findall(rf"^```{language}\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)


def exported(page: str) -> dict[str, str]:
    """Return the variables that a page sets."""
    lines = [line.strip() for block in blocks(page, "bash") for line in block.splitlines()]
    words = [shlex.split(line, comments=True)[1] for line in lines if line.startswith("export ")]
    return dict(word.split("=", 1) for word in reversed(words))  # the first of a name


def test_a_page_for_each_is_linked():
    notes = (PAGES.parent / "processes.md").read_text()
    assert {f"clusters/{page.name}" for page in PAGES.iterdir()} == set(LINK.findall(notes))


MANIFEST = re.compile(
    r"^```sh\n(jtrain launch --engine .*)\n```\n+<!-- .* -->\n```yaml\n((?:.*\n)*?)```", re.M
)


@pytest.mark.parametrize("page", ["jobset", "kubeflow", "skypilot"])
def test_a_manifest_is_what_its_command_prints(page, capsys, monkeypatch):
    monkeypatch.chdir(PAGES.parents[1])
    found = MANIFEST.findall((PAGES / f"{page}.md").read_text())
    assert len(found) == len(blocks(page, "yaml")) > 0
    for command, manifest in found:
        assert main(shlex.split(command)[1:]) == 0
        assert capsys.readouterr().out == manifest


@pytest.mark.parametrize(
    ("page", "kind", "processes", "coordinator"),
    [("tf_config", "TF_CONFIG", 2, "10.0.0.1:8476"), ("one_machine", "jtrain", 2, "10.0.0.1:8476")],
)
def test_the_variables_of_a_page_are_a_cluster(page, kind, processes, coordinator):
    found = detect(exported(page))
    assert (found.kind, found.processes, found.index) == (kind, processes, 0)
    assert str(found.coordinator) == coordinator


def test_the_variables_of_an_indexed_job_are_a_cluster():
    (text,) = blocks("../processes", "yaml")
    told = {each["name"]: each["value"] for each in YAML(typ="safe").load(text)["env"]}
    for index in range(4):
        found = detect(told | {"JOB_COMPLETION_INDEX": f"{index}", "HOSTNAME": f"train-{index}"})
        assert (found.kind, found.index, found.processes) == ("Kubernetes Job", index, 4)
        assert str(found.coordinator) == "train-0.pods:8476"


def test_the_variables_of_certificates_are_those_of_jax():
    lines = [line for block in blocks("../processes", "bash") for line in block.splitlines()]
    exported = {line.split("=")[0] for line in lines if line.startswith("export ")}
    assert exported == {f"export {name}" for name in (CERTIFICATE, KEY, AUTHORITY)}


def test_the_script_of_the_page_takes_its_words(tmp_path):
    """The command is typed with --dry-run, which needs no cloud."""
    lines = [line for block in blocks("tpu_vm", "bash") for line in block.splitlines()]
    (typed,) = (shlex.split(line) for line in lines if line.startswith("scripts/"))
    at = typed.index("run")
    command = ["bash", str(PAGES.parents[1] / typed[0]), *typed[1:at], "--dry-run", *typed[at:]]
    done = subprocess.run(command, cwd=tmp_path, **SAID)
    assert done.returncode == 0, done.stderr
    assert " ".join(typed[at:]) in done.stderr
