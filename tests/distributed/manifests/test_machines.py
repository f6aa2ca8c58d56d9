"""Machines of a topology: the published tables, and what is refused with what there is."""

import re

import pytest
from manifest_jobs import job

from jtrain.distributed.manifests import find_machines, job_set, sky_task, train_job
from jtrain.errors import ConfigError

# Machine type, chips of a host, hosts, TPU VM: from the tables of
# https://cloud.google.com/kubernetes-engine/docs/concepts/plan-tpus and of the pages on each
# generation, such as https://cloud.google.com/tpu/docs/v6e.
PUBLISHED = {
    "v4:2x2x1": ("ct4p-hightpu-4t", 4, 1, "v4-8"),
    "v4:2x2x4": ("ct4p-hightpu-4t", 4, 4, "v4-32"),
    "v5e:1x1": ("ct5lp-hightpu-1t", 1, 1, "v5litepod-1"),
    "v5e:2x2": ("ct5lp-hightpu-4t", 4, 1, "v5litepod-4"),
    "v5e:2x4": ("ct5lp-hightpu-8t", 8, 1, "v5litepod-8"),
    "v5e:4x4": ("ct5lp-hightpu-4t", 4, 4, "v5litepod-16"),
    "v5e:16x16": ("ct5lp-hightpu-4t", 4, 64, "v5litepod-256"),
    "v5p:2x2x1": ("ct5p-hightpu-4t", 4, 1, "v5p-8"),
    "v5p:2x2x2": ("ct5p-hightpu-4t", 4, 2, "v5p-16"),
    "v5p:4x4x8": ("ct5p-hightpu-4t", 4, 32, "v5p-256"),
    "v6e:1x1": ("ct6e-standard-1t", 1, 1, "v6e-1"),
    "v6e:2x4": ("ct6e-standard-8t", 8, 1, "v6e-8"),
    "v6e:4x8": ("ct6e-standard-4t", 4, 8, "v6e-32"),
    "tpu7x:2x2x1": ("tpu7x-standard-4t", 4, 1, ""),
    "tpu7x:4x4x4": ("tpu7x-standard-4t", 4, 16, ""),
}


@pytest.mark.parametrize(("topology", "row"), PUBLISHED.items())
def test_hosts_are_those_of_the_published_tables(topology, row):
    found = find_machines(topology)
    assert (found.machine_type, found.chips, found.hosts, found.accelerator_type) == row


def test_a_chip_of_ironwood_is_two_devices():
    assert find_machines("tpu7x:2x2x2").devices == 8
    assert find_machines("v5p:2x2x2").devices == 4


ADVICE = re.compile(
    r"(?:Write|write|slice:) (?:--topology )?((?:\d+\*)?\w+:\d+(?:x\d+)*)|such as (2\*[\w:]+)"
)


@pytest.mark.parametrize(
    ("topology", "said"),
    [
        ("h100:3", r"a machine has 1, 2, 4 or 8 GPUs of this kind, found 3. Write h100:2"),
        ("h100:16", r"Write h100:8, or 2\*h100:8 for 2 machines"),
        ("2*h100:16", r"Write h100:8, or 4\*h100:8 for 4 machines"),
        ("h100:2x4", r"found 2x4. Write h100:8"),
        ("gb200:8", r"1, 2 or 4 GPUs.* Write gb200:4, or 2\*gb200:4 for 2"),
        ("v5e:2x3", r"no slice of v5e has the shape 2x3: 6 chips are not whole hosts of 4"),
        ("v5e:4x4x4", r"Slices of v5e are 1x1, 2x2, 2x4, 4x4"),
        ("v5p:4x4", r"no slice of v5p has the shape 4x4. Slices of v5p are 2x2x1"),
        ("v5p:8x4x4", r"multiples of 4 with A <= B <= C"),
        ("2*v5e:2x2", r"slices of one host cannot be joined.* such as 2\*v5e:4x4"),
        ("cpu:8", r"a cluster has no 'cpu'; kinds: v4, v5e"),
        ("h10:8", r"a cluster has no 'h10'"),
        ("v5e", r"not a topology: write KIND:SHAPE"),
        ("0*h100:8", r"not a topology"),
    ],
)  # fmt: skip
def test_what_there_is_not_is_refused_with_what_there_is(topology, said):
    with pytest.raises(ConfigError, match=said) as raised:
        find_machines(topology)
    for advice in ADVICE.findall(str(raised.value)):
        find_machines("".join(advice))


@pytest.mark.parametrize(
    ("engine", "topology", "changed", "said"),
    [
        ("skypilot", "tpu7x:2x2x1", {}, "tpu7x is no TPU VM.* Use --engine k8s"),
        ("skypilot", "2*v6e:4x4", {}, "does not join slices.* --topology v6e:4x4"),
        ("trainjob", "2*v6e:4x4", {}, "2 slices are 2 jobs.* --topology v6e:4x4"),
        ("k8s", "h100:8", {"image": ""}, "Write --image REGISTRY/NAME:TAG"),
        ("k8s", "h100:8", {"claim": ""}, "Write --claim NAME, a PersistentVolumeClaim"),
        ("k8s", "h100:8", {"volume": "shared"}, "begins with /"),
        ("k8s", "h100:8", {"name": "GPT_2"}, "Write --name gpt-2"),
        ("k8s", "h100:8", {"name": "2nd"}, "Write --name nd"),
        ("trainjob", "h100:8", {"name": "-"}, "Write --name train"),
        ("k8s", "2*v6e:16x16", {"name": "a" * 50}, "6 characters more.* at most 44: --name a"),
        ("skypilot", "h100:8", {"name": "1_"}, "Write --name train"),
        ("skypilot", "2*h100:8", {"claim": ""}, "share runs/. Write --claim HOST:/PATH"),
        ("skypilot", "h100:8", {"claim": ""}, "checkpoint.store=gs://bucket/runs"),
        ("skypilot", "v5e:4x4", {"claim": "disk"}, "mounts no volume in a TPU VM"),
        ("skypilot", "h100:8", {"image": "a/b:1"}, "Leave --image out"),
        ("skypilot", "h100:8", {"queue": "q"}, "Leave it out"),
    ],
)
def test_what_an_engine_does_not_take_is_refused(engine, topology, changed, said):
    build = {"k8s": job_set, "trainjob": train_job, "skypilot": sky_task}[engine]
    with pytest.raises(ConfigError, match=said) as raised:
        build(job(engine, topology, **changed))
    if name := re.search(r"--name ([a-z][\w-]*)\.$", str(raised.value)):
        build(job(engine, topology, **{**changed, "name": name[1]}))


def test_a_machine_without_a_volume_needs_a_store():
    sky_task(job("skypilot", "h100:8", claim="", store="gs://bucket/runs"))


def test_a_name_may_be_as_long_as_its_pods_allow():
    job_set(job("k8s", "2*v6e:16x16", name="a" * 44))
