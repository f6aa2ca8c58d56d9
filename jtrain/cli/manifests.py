"""Manifests that `jtrain launch --engine k8s --print run CONFIG` prints for other programs."""

import argparse
import re
import shlex
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from jtrain.cli.output import print_text as print
from jtrain.config.dump import format_blocks
from jtrain.distributed.manifests import (
    ClusterJob,
    Machines,
    find_machines,
    job_set,
    sky_task,
    to_label,
    train_job,
)
from jtrain.errors import ConfigError, UserError


class ManifestEngine(NamedTuple):
    """A program that starts the processes of a run from a manifest."""

    kind: str
    """The manifest's name there."""
    build: Callable[[ClusterJob], dict[str, Any] | list[dict[str, Any]]]
    apply: str
    """The command that starts a manifest in the file NAME.yaml."""


ENGINES: Mapping[str, ManifestEngine] = {
    "k8s": ManifestEngine("JobSet", job_set, "kubectl apply --server-side -f {name}.yaml"),
    "trainjob": ManifestEngine("TrainJob", train_job, "kubectl apply --server-side -f {name}.yaml"),
    "skypilot": ManifestEngine("SkyPilot task", sky_task, "sky jobs launch {name}.yaml"),
}
# Options of engines that start the processes.
_STARTS = ("processes", "devices", "port", "patience")
_STARTS += ("address", "resources", "env")
_RESTARTS = 10


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of manifests to those of `jtrain launch`."""
    group = parser.add_argument_group(f"of the engines {', '.join(ENGINES)}")
    words = "print the manifest and nothing else"
    group.add_argument("--print", action="store_true", help=words)
    words = "machines: v5e:4x4, 2*v6e:4x4 (slices), h100:8, 2*h100:8 (hosts)"
    group.add_argument("--topology", default="", metavar="KIND:SHAPE", help=words)
    words = "container image with jtrain and your experiment"
    group.add_argument("--image", default="", metavar="IMAGE", help=words)
    words = "name of the job; default the name of the run"
    group.add_argument("--name", default="", metavar="NAME", help=words)
    words = (
        "volume of all hosts: a PersistentVolumeClaim; for SkyPilot a volume, or HOST:/PATH of NFS"
    )
    group.add_argument("--claim", default="", metavar="NAME", help=words)
    words = "path at which it is mounted; default /shared"
    group.add_argument("--volume", default="/shared", metavar="PATH", help=words)
    words = "local queue of Kueue"
    group.add_argument("--queue", default="", metavar="NAME", help=words)
    words = "label that the nodes must have; may be repeated"
    group.add_argument("--select", action="append", default=[], metavar="KEY=VALUE", help=words)
    words = "restart pods in place, by JobSet's agent of this image (alpha; k8s only)"
    group.add_argument("--in-place", default="", metavar="IMAGE", help=words)
    words = "machines that may be taken away, for less money (skypilot only)"
    group.add_argument("--spot", action="store_true", help=words)


def check_no_options(words: Sequence[str], engine: str) -> None:
    """Raise UserError if an option of manifests was typed for an engine that prints none."""
    parser = argparse.ArgumentParser(add_help=False)
    add_options(parser)
    typed = {word.partition("=")[0] for word in words}
    for name in vars(parser.parse_args([])):
        option = f"--{name.replace('_', '-')}"
        if option in typed:
            raise UserError(
                f"jtrain launch: {option} is for a manifest, found --engine {engine}. Leave it "
                f"out, or name the engine: {', '.join(f'--engine {name}' for name in ENGINES)}."
            )


def print_manifest(args: argparse.Namespace, words: Sequence[str], command: Sequence[str]) -> int:
    """Print the manifest of `jtrain COMMAND`; return the exit code.

    Args:
        args: the options.
        words: the options as they were typed.
        command: the verb and what follows it.

    Raises:
        UserError: if the engine cannot run it; ConfigError for a config that does not fit.
    """
    engine = ENGINES[args.engine]
    _check_options(args, words, command[0])
    machines = find_machines(args.topology)
    job = _job(args, words, command, machines)
    built = engine.build(job)
    documents = built if isinstance(built, list) else [built]
    apply = engine.apply.format(name=job.name)
    typed = shlex.join(["jtrain", "launch", *words, *command])
    header = f"{engine.kind} of {machines.topology}: {machines.describe()}"
    if machines.tpu and args.engine != "skypilot":
        header += f" ({machines.machine_type} on GKE)"
    print(format_blocks(documents, f"{header}, by\n  {typed}\nStart it: {apply}"), end="")
    if not args.print:
        printed = shlex.join(["jtrain", "launch", "--print", *words, *command])
        print(
            f"jtrain starts nothing on a cluster. Write the manifest to a file, and start it:\n"
            f"  {printed} > {job.name}.yaml\n  {apply}",
            file=sys.stderr,
        )
    return 0


def _check_options(args: argparse.Namespace, words: Sequence[str], verb: str) -> None:
    engine = f"jtrain launch --engine {args.engine}"
    typed = {word.partition("=")[0] for word in words}
    for name in _STARTS:
        if f"--{name}" in typed:
            raise UserError(
                f"{engine}: --{name} is for processes that jtrain starts. The manifest has a "
                f"process for each host of the topology: leave --{name} out, and write --topology "
                f"v5e:4x4 or 2*h100:8."
            )
    if verb != "run":
        raise UserError(
            f"{engine}: a manifest is for the verb run, found {verb}: "
            f"{engine} --topology v5e:4x4 run CONFIG"
        )
    if not args.topology:
        raise UserError(
            f"{engine}: the machines are missing. Write --topology v5e:4x4 for a slice of a TPU, "
            f"2*v6e:4x4 for two, h100:8 for a machine of 8 GPUs, 2*h100:8 for two."
        )
    if args.spot and args.engine != "skypilot":
        raise UserError(
            f"{engine}: --spot is for SkyPilot. On GKE, nodes that may be taken away have a label: "
            f"--select cloud.google.com/gke-spot=true"
        )
    if args.in_place and args.engine != "k8s":
        raise UserError(f"{engine}: --in-place is for --engine k8s; leave it out.")
    if args.select and args.engine == "skypilot":
        raise UserError(f"{engine}: --select chooses nodes of Kubernetes; leave it out.")
    if args.restarts < 0:
        raise UserError(f"{engine}: --restarts is at least 0; type --restarts {_RESTARTS}")


def _job(
    args: argparse.Namespace, words: Sequence[str], command: Sequence[str], machines: Machines
) -> ClusterJob:
    # The config is read as on the cluster, so that its errors come before anything is started.
    from jtrain.cli import run
    from jtrain.config.resolve import resolve
    from jtrain.inspect.plan.topology import check_fills

    typed = run._arguments().parse(command[1:])
    config = resolve(typed.config, typed.settings).config
    check_fills(
        config,
        str(machines.topology),
        platform="tpu" if machines.tpu else "gpu",
        slices=machines.groups,
        hosts=machines.hosts,
        devices=machines.devices,
    )
    given = any(word.partition("=")[0] == "--restarts" for word in words)
    return ClusterJob(
        name=args.name or to_label(config.name),
        machines=machines,
        command=("jtrain", *command),
        image=args.image,
        restarts=args.restarts if given else _RESTARTS,
        claim=args.claim,
        store=config.checkpoint.store,
        volume=args.volume.rstrip("/"),
        queue=args.queue,
        select=_labels(args.select),
        agent=args.in_place,
        spot=args.spot,
        grace=int(config.checkpoint.grace) + 5,
    )


def _labels(typed: Sequence[str]) -> dict[str, str]:
    """Return labels that were typed as KEY=VALUE.

    Raises:
        ConfigError: for other words.
    """
    labels = {}
    for word in typed:
        found = re.fullmatch(r"([\w./-]+)=([\w.-]*)", word, re.ASCII)
        if not found:
            raise ConfigError(
                f"--select {word} is not KEY=VALUE: write a label of the nodes, such as "
                f"--select nvidia.com/gpu.product=NVIDIA-H100-80GB-HBM3."
            )
        labels[found[1]] = found[2]
    return labels
