"""Task of SkyPilot, https://docs.skypilot.co, v0.14."""

import dataclasses
import re
import shlex
from typing import Any

from jtrain.distributed.manifests.kubernetes import ClusterJob
from jtrain.errors import ConfigError

# A planned stop, by jtrain's own code or by the signal: restarted without being counted.
_STOPPED = [75, 143]
_NFS = re.compile(r"[\w.-]+:/\S*")
_PYTHON = "3.12"  # TPU VMs have 3.10


def sky_task(job: ClusterJob) -> dict[str, Any]:
    """Return the task of a job: a node for each machine with GPUs, or one for a TPU slice.

    Raises:
        ConfigError: for a name or a topology that SkyPilot does not have.
    """
    _check(job)
    machines = job.machines
    resources: dict[str, Any]
    if machines.tpu:
        resources = {
            "accelerators": f"tpu-{machines.accelerator_type}",
            "accelerator_args": {"runtime_version": machines.tpu.runtime},
        }
    else:
        resources = {"accelerators": f"{machines.gpu}:{machines.chips}"}
    if job.image:
        resources["image_id"] = f"docker:{job.image}"
    if job.spot:
        resources["use_spot"] = True
    resources["job_recovery"] = {
        "max_restarts_on_errors": job.restarts,
        "recover_on_exit_codes": _STOPPED,
    }
    task: dict[str, Any] = {
        "name": job.name,
        "resources": resources,
        "num_nodes": 1 if machines.tpu else machines.hosts,
        "workdir": ".",
    }
    if job.claim and not _NFS.fullmatch(job.claim):
        task["volumes"] = {job.volume: job.claim}
    if not job.image:
        task["setup"] = _setup(job, "tpu" if machines.tpu else "cuda12")
    return {**task, "run": _run(job)}


def _check(job: ClusterJob) -> None:
    machines = job.machines
    if machines.tpu and not machines.accelerator_type:
        raise ConfigError(
            f"--topology {machines.topology}: {machines.topology.kind} is not a TPU VM, which "
            f"SkyPilot starts: GKE has it. Use --engine k8s."
        )
    if machines.groups > 1:
        raise ConfigError(
            f"--topology {machines.topology}: SkyPilot does not join slices. Use --engine k8s, or "
            f"one slice: --topology {dataclasses.replace(machines.topology, count=1)}."
        )
    if machines.processes > 1 and not job.claim:
        raise ConfigError(
            f"the {machines.processes} processes of {machines.topology} share runs/. Write --claim "
            f"HOST:/PATH, a file system by NFS, or --claim NAME, a volume of SkyPilot."
        )
    if not job.claim and not job.store:
        raise ConfigError(
            "a machine that is taken away takes runs/ with it. Write checkpoint.store="
            "gs://bucket/runs after the config, to which checkpoints are copied; or --claim "
            "HOST:/PATH, a file system by NFS."
        )
    if machines.tpu and job.claim and not _NFS.fullmatch(job.claim):
        raise ConfigError(
            f"--claim {job.claim}: SkyPilot mounts no volume in a TPU VM. Write --claim "
            f"HOST:/PATH, a file system by NFS, such as one of Filestore."
        )


def _setup(job: ClusterJob, extra: str) -> str:
    mount = ""
    if _NFS.fullmatch(job.claim):
        path = shlex.quote(job.volume)
        mount = (
            "sudo apt-get install -qq nfs-common\n"
            f"sudo mkdir -p {path}\n"
            f"mountpoint -q {path} || sudo mount -t nfs {shlex.quote(job.claim)} {path}\n"
            f'sudo install -d -o "$(id -u)" {path}/runs\n'
        )
    return mount + (
        "command -v uv > /dev/null || curl -LsSf https://astral.sh/uv/install.sh | sh\n"
        'export PATH="$HOME/.local/bin:$PATH"\n'
        f"uv venv --python {_PYTHON} --allow-existing ~/jtrain-env\n"
        f"uv pip install --python ~/jtrain-env 'jtrain[{extra}]'\n"
    )


def _run(job: ClusterJob) -> str:
    lines = []
    if job.machines.tpu:
        lines += [
            "# SkyPilot's order of the hosts is not that of the slice: jtrain asks the slice.",
            "unset SKYPILOT_NODE_IPS SKYPILOT_NODE_RANK SKYPILOT_NUM_NODES",
        ]
    if not job.image:
        lines.append('export PATH="$HOME/jtrain-env/bin:$PATH"')
    if job.claim:
        runs = shlex.quote(f"{job.volume}/runs")
        lines.append(f"mkdir -p {runs} && rm -rf runs && ln -s {runs} runs")
    return "\n".join([*lines, f"exec {shlex.join(job.command)}"]) + "\n"
