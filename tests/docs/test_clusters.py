"""docs/clusters.md: the variables that its sections set identify every process."""

import re
import shlex
import subprocess
from pathlib import Path

import pytest
from plain_environ import SAID
from ruamel.yaml import YAML

from jtrain.distributed.cluster import detect
from jtrain.distributed.cluster.tls import AUTHORITY, CERTIFICATE, KEY

ROOT = Path(__file__).parents[2]
CLUSTERS, PROCESSES = ((ROOT / f"docs/{name}.md").read_text() for name in ("clusters", "processes"))


def section(title: str) -> str:
    """Return a section of docs/clusters.md, to the next heading."""
    return CLUSTERS.partition(f"\n## {title}\n")[2].partition("\n## ")[0]


def blocks(text: str, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)


def exported(text: str) -> dict[str, str]:
    """Return the variables that a text sets."""
    lines = [line.strip() for block in blocks(text, "bash") for line in block.splitlines()]
    words = [shlex.split(line, comments=True)[1] for line in lines if line.startswith("export ")]
    return dict(word.split("=", 1) for word in reversed(words))  # the first of a name


def test_the_first_table_links_every_section():
    linked = re.findall(r"\]\(#([^)]+)\)", CLUSTERS.partition("\n## ")[0])
    titles = re.findall(r"^## (.*)$", CLUSTERS, re.MULTILINE)
    assert set(linked) == {
        re.sub(r"[^\w ]", "", title.lower()).replace(" ", "-") for title in titles
    }


@pytest.mark.parametrize(
    ("title", "kind"),
    [("TF_CONFIG", "TF_CONFIG"), ("One machine, or several by hand", "jtrain")],
)
def test_the_variables_of_a_section_are_a_cluster(title, kind):
    found = detect(exported(section(title)))
    assert (found.kind, found.processes, found.index) == (kind, 2, 0)
    assert str(found.coordinator) == "10.0.0.1:8476"


def test_the_variables_of_an_indexed_job_are_a_cluster():
    (text,) = blocks(section("How a process finds its index"), "yaml")
    told = {each["name"]: each["value"] for each in YAML(typ="safe").load(text)["env"]}
    for index in range(4):
        found = detect(told | {"JOB_COMPLETION_INDEX": f"{index}", "HOSTNAME": f"train-{index}"})
        assert (found.kind, found.index, found.processes) == ("Kubernetes Job", index, 4)
        assert str(found.coordinator) == "train-0.pods:8476"


def test_the_variables_of_certificates_are_those_of_jax():
    lines = [line for block in blocks(PROCESSES, "bash") for line in block.splitlines()]
    exported = {line.split("=")[0] for line in lines if line.startswith("export ")}
    assert exported == {f"export {name}" for name in (CERTIFICATE, KEY, AUTHORITY)}


def test_the_script_of_the_section_takes_its_words(tmp_path):
    """The command is typed with --dry-run, which needs no cloud."""
    lines = [line for block in blocks(section("TPU VMs"), "bash") for line in block.splitlines()]
    (typed,) = (shlex.split(line) for line in lines if line.startswith("scripts/"))
    at = typed.index("run")
    command = ["bash", str(ROOT / typed[0]), *typed[1:at], "--dry-run", *typed[at:]]
    done = subprocess.run(command, cwd=tmp_path, **SAID)
    assert done.returncode == 0, done.stderr
    assert " ".join(typed[at:]) in done.stderr
