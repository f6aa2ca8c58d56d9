"""Manifests: valid by the published schemas, read back by `detect`, printed by `jtrain launch`."""

import json
import os
import re
import shlex
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from plain_environ import SAID
from ruamel.yaml import YAML

from jtrain.cli import main
from jtrain.config.dump import format_blocks
from jtrain.distributed.cluster import detect
from jtrain.distributed.cluster.detect import KINDS
from jtrain.distributed.manifests import ClusterJob, find_machines, job_set, sky_task, train_job
from jtrain.errors import ConfigError

pytestmark = pytest.mark.usefixtures("from_the_top")
BUILD = {"k8s": job_set, "trainjob": train_job, "skypilot": sky_task}
JOINS_SLICES = {"k8s"}
TOPOLOGIES = {"v5e:4x4": 4, "2*v6e:4x4": 8, "h100:8": 1, "2*h100:8": 2}  # and their hosts
CASES = [
    (engine, topology)
    for engine in BUILD
    for topology in TOPOLOGIES
    if engine in JOINS_SLICES or topology != "2*v6e:4x4"
]
COMMAND = ("jtrain", "run", "configs/gpt2.yaml", "data.path=data/web", "parallel.kind=fsdp")


def job(engine: str, topology: str, **changed: Any) -> ClusterJob:
    """Return a job that the engine takes."""
    sky = engine == "skypilot"
    given: dict[str, Any] = {
        "name": "gpt2",
        "image": "" if sky else "registry/jtrain:1",
        "claim": "10.0.0.2:/share" if sky else "shared",
    }
    machines = find_machines(topology)
    return ClusterJob(**{**given, "machines": machines, "command": COMMAND, **changed})


def documents(engine: str, made: ClusterJob) -> list[dict[str, Any]]:
    """Return the manifests of a job."""
    built = BUILD[engine](made)
    return built if isinstance(built, list) else [built]


def job_set_pods(manifest: dict[str, Any]) -> Iterator[dict[str, str]]:
    """Yield the environment of each pod, as Kubernetes and JobSet's annotations make it.

    Source: https://github.com/kubernetes-sigs/jobset/blob/v0.12.0/api/jobset/v1alpha2/jobset_types.go;
    https://kubernetes.io/docs/tasks/job/indexed-parallel-processing-static/.
    """
    (workers,) = manifest["spec"]["replicatedJobs"]
    template = workers["template"]["spec"]
    (container,) = template["template"]["spec"]["containers"]
    for index in range(workers["replicas"]):
        annotations = {
            "jobset.sigs.k8s.io/jobset-name": manifest["metadata"]["name"],
            "jobset.sigs.k8s.io/replicatedjob-name": workers["name"],
            "jobset.sigs.k8s.io/job-index": str(index),
        }
        for pod in range(template["completions"]):
            env = {"JOB_COMPLETION_INDEX": str(pod)}
            for variable in container["env"]:
                env[variable["name"]] = variable.get("value") or _field(variable, annotations)
            yield env


def _field(variable: dict[str, Any], annotations: dict[str, str]) -> str:
    path = variable["valueFrom"]["fieldRef"]["fieldPath"]
    name = path.removeprefix("metadata.annotations['").removesuffix("']")
    return annotations[name]


def train_job_pods(manifest: dict[str, Any]) -> Iterator[dict[str, str]]:
    """Yield the variables that Kubeflow Trainer sets.

    Source: https://github.com/kubeflow/trainer/blob/v2.3.0/pkg/runtime/framework/plugins/jax/jax.go.
    """
    name, nodes = manifest["metadata"]["name"], manifest["spec"]["trainer"]["numNodes"]
    for node in range(nodes):
        yield {
            "JAX_NUM_PROCESSES": str(nodes),
            "JAX_PROCESS_ID": str(node),
            "JAX_COORDINATOR_ADDRESS": f"{name}-node-0-0.{name}:29500",
        }


SCHEMAS = Path(__file__).parent / "schemas"
GOLDEN = Path(__file__).parents[2] / "golden" / "manifests"


def strict(schema: Any) -> Any:
    """Return a schema that refuses unknown fields, as `kubectl apply --server-side` does."""
    if isinstance(schema, list):
        return [strict(part) for part in schema]
    if not isinstance(schema, dict):
        return schema
    if schema.get("x-kubernetes-int-or-string"):
        return {"type": ["integer", "string"]}
    found = {key: strict(value) for key, value in schema.items()}
    if "properties" in schema and not schema.get("x-kubernetes-preserve-unknown-fields"):
        found.setdefault("additionalProperties", False)
    return found


def validator(document: dict[str, Any]) -> jsonschema.Draft202012Validator:
    name = document.get("kind", "skypilot").lower()
    schema = strict(json.loads((SCHEMAS / f"{name}.json").read_text()))
    # The schema of an object's own name is the API server's.
    if "metadata" in schema["properties"]:
        schema["properties"]["metadata"] = {"type": "object", "required": ["name"]}
    return jsonschema.Draft202012Validator(schema)


@pytest.mark.parametrize("engine", BUILD)
def test_each_is_its_golden_file_and_valid_by_the_published_schema(engine):
    changed = {"queue": "research"} if engine != "skypilot" else {"spot": True}
    for topology in [topology for name, topology in CASES if name == engine]:
        text = format_blocks(documents(engine, job(engine, topology)))
        name = f"{engine}-{topology.replace('*', 'x').replace(':', '-')}.yaml"
        assert text == (GOLDEN / name).read_text(), f"{name} would be\n{text}"
        for document in documents(engine, job(engine, topology, **changed)):
            validator(document).validate(document)
    assert len(list(GOLDEN.iterdir())) == len(CASES)


def places(environments: list[dict[str, str]]) -> list[tuple[int, int, str]]:
    found = [detect(environ) for environ in environments]
    return [(each.index, each.processes, str(each.coordinator)) for each in found]


@pytest.mark.parametrize(("topology", "hosts"), [("2*v6e:4x4", 8), ("h100:8", 1)])
def test_each_pod_of_a_job_set_finds_its_place(topology, hosts):
    (manifest,) = documents("k8s", job("k8s", topology))
    pods = list(job_set_pods(manifest))
    assert {detect(pod).kind for pod in pods} == {"Kubernetes JobSet"}
    assert places(pods) == [(i, hosts, "gpt2-workers-0-0.gpt2:8476") for i in range(hosts)]


@pytest.mark.parametrize("topology", ["v5e:4x4", "2*h100:8"])
def test_each_pod_of_a_train_job_finds_its_place(topology):
    _, manifest = documents("trainjob", job("trainjob", topology))
    hosts = TOPOLOGIES[topology]
    expected = [(i, hosts, "gpt2-node-0-0.gpt2:29500") for i in range(hosts)]
    assert places(list(train_job_pods(manifest))) == expected


def environment_of_run(task: dict[str, Any], tmp_path: Path, environ: dict[str, str]) -> dict:
    """Run the task's script in a shell; return the environment that its jtrain gets."""
    programs = tmp_path / "jtrain-env" / "bin"
    programs.mkdir(parents=True, exist_ok=True)
    program = programs / "jtrain"
    program.write_text('#!/bin/sh\necho "$*" >"$HOME/words"\nexec env -0\n')
    program.chmod(0o755)
    own = {"HOME": str(tmp_path), "PATH": os.environ["PATH"]}
    command, env = ["bash", "-ec", task["run"]], own | environ
    done = subprocess.run(command, env=env, cwd=tmp_path, check=True, **SAID)
    return dict(line.split("=", 1) for line in done.stdout.split("\0") if line)


def sky_variables(rank: int, addresses: list[str]) -> dict[str, str]:
    """Return what SkyPilot sets, by https://docs.skypilot.co/en/latest/running-jobs/distributed-jobs.html."""
    return {
        "SKYPILOT_NODE_RANK": str(rank),
        "SKYPILOT_NODE_IPS": "\n".join(addresses),
        "SKYPILOT_NUM_NODES": str(len(addresses)),
        "SKYPILOT_NUM_GPUS_PER_NODE": "8",
    }


def test_each_node_of_a_task_of_sky_pilot_finds_its_place(tmp_path):
    (task,) = documents("skypilot", job("skypilot", "2*h100:8", volume=f"{tmp_path}/shared"))
    assert task["num_nodes"] == 2
    pods = [
        environment_of_run(task, tmp_path, sky_variables(rank, ["10.0.0.1", "10.0.0.2"]))
        for rank in range(2)
    ]
    assert places(pods) == [(i, 2, "10.0.0.1:8476") for i in range(2)]
    assert (tmp_path / "words").read_text().split() == [
        "run", "configs/gpt2.yaml", "data.path=data/web", "parallel.kind=fsdp",
    ]  # fmt: skip
    assert (tmp_path / "runs").resolve() == tmp_path / "shared" / "runs"


def test_a_slice_of_sky_pilot_is_asked_for_its_own_order(tmp_path):
    """SkyPilot sorts addresses, and the hosts of a slice have an order of their own."""
    (task,) = documents("skypilot", job("skypilot", "v5e:4x4", volume=f"{tmp_path}/shared"))
    assert task["num_nodes"] == 1
    addresses = [f"10.0.0.{i}" for i in range(1, 5)]
    environ = environment_of_run(task, tmp_path, sky_variables(3, addresses))
    marks = {mark for kind in KINDS for mark in kind.variables}
    assert not marks & environ.keys(), "detect asks the metadata server only without variables"
    assert detect(environ, root=tmp_path).kind == "one process"  # this machine is not a TPU VM


# Machine type, chips of a host, hosts, TPU VM: from the tables of
# https://cloud.google.com/kubernetes-engine/docs/concepts/plan-tpus and of the pages on each
# generation, such as https://cloud.google.com/tpu/docs/v6e.
PUBLISHED = {
    "v4:2x2x1": ("ct4p-hightpu-4t", 4, 1, "v4-8"),
    "v5e:2x4": ("ct5lp-hightpu-8t", 8, 1, "v5litepod-8"),
    "v5e:16x16": ("ct5lp-hightpu-4t", 4, 64, "v5litepod-256"),
    "v5p:2x2x2": ("ct5p-hightpu-4t", 4, 2, "v5p-16"),
    "v6e:4x8": ("ct6e-standard-4t", 4, 8, "v6e-32"),
    "tpu7x:4x4x4": ("tpu7x-standard-4t", 4, 16, ""),
}


def test_hosts_are_those_of_the_published_tables():
    for topology, row in PUBLISHED.items():
        found = find_machines(topology)
        assert (found.machine_type, found.chips, found.hosts, found.accelerator_type) == row
    # A chip of Ironwood is two devices.
    assert find_machines("tpu7x:2x2x2").devices == 8
    assert find_machines("v5p:2x2x2").devices == 4


@pytest.mark.parametrize(
    ("topology", "said"),
    [
        ("h100:3", r"a machine has 1, 2, 4 or 8 GPUs of this kind, found 3. Write h100:2"),
        ("v5e:2x3", r"no slice of v5e has the shape 2x3: 6 chips are not whole hosts of 4"),
        ("2*v5e:2x2", r"slices of one host cannot be joined.* such as 2\*v5e:4x4"),
        ("h10:8", r"a cluster has no 'h10'"),
    ],
)  # fmt: skip
def test_what_there_is_not_is_refused_with_what_there_is(topology, said):
    with pytest.raises(ConfigError, match=said):
        find_machines(topology)


GIVEN = ["--image", "registry/jtrain:1", "--claim", "shared"]
RUN = ["run", "configs/gpt2.yaml", "data.path=data/web", "parallel.kind=fsdp"]


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
    # The line that it advises prints the same.
    line = re.search(r"jtrain (launch .*) > gpt2\.yaml", shown.err)
    assert line, shown.err
    assert main(shlex.split(line[1])) == 0
    again = capsys.readouterr()
    assert again.out == shown.out


def test_the_name_follows_from_the_run_and_nothing_is_started(monkeypatch, capsys):
    monkeypatch.setattr(subprocess, "Popen", None)
    words = ["--engine", "trainjob", "--topology", "v5e:4x4", *GIVEN]
    assert launch(*words, "run", "configs/llama2_7b.yaml") == 0
    documents = list(YAML(typ="safe").load_all(capsys.readouterr().out))
    assert [each["metadata"]["name"] for each in documents] == ["llama2-7b"] * 2
    words = ["--engine", "skypilot", "--topology", "2*h100:8", "--claim", "10.0.0.2:/share"]
    assert launch(*words, "--spot", *RUN, "microbatches=30") == 0
    assert "use_spot: true" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--processes", "3"], "takes no --processes; leave it out, or type --engine local"),
        # The config has 480 rows in 30 microbatches.
        (["--topology", "v5e:4x8"], "v5e:4x8 has 32 devices. batch: 480 rows do not divide"),
        (["run", "configs/gpt2.yaml", "data.path=x", "parallel.kind=single"],
         "kind=single uses 1 of them. Write parallel.kind=fsdp"),
        (["run", "configs/gpt2.yaml", "data.path=x", "parallel.kind=sharded", "parallel.tensor=3"],
         "h100:8 has 8 devices. parallel: tensor 3 = 3 shards"),
        (["run", "configs/gpt2.yaml", "data.path=x", "parallel.devices=4"],
         "uses 4 of them.* parallel.devices=0"),
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


def test_options_of_the_verb_are_its_own_and_a_value_of_an_option_is_no_verb(capsys):
    words = ["--engine", "k8s", "--topology", "h100:8", *GIVEN, "--name", "run"]
    assert launch(*words, *RUN, "--overfit", "8") == 0
    assert "parallel.kind=fsdp, --overfit, '8']" in capsys.readouterr().out
