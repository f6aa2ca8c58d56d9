"""`jtrain launch --processes N VERB ...`: any verb in several processes, here or by an engine."""

import argparse
import importlib
import os
import re
import shlex
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from jtrain.cli import VERBS
from jtrain.cli.arguments import Arguments
from jtrain.cli.output import print_text as print
from jtrain.config.dump import format_blocks
from jtrain.distributed.cluster.cluster import LAUNCHER, NUMBER
from jtrain.distributed.launcher import launch
from jtrain.distributed.manifests import (
    ClusterJob,
    Machines,
    find_machines,
    job_set,
    sky_task,
    to_label,
    train_job,
)
from jtrain.distributed.ray_cluster import (
    check_installed,
    connected,
    forwarded,
    parse_address,
    parse_resources,
    process_resources,
)
from jtrain.distributed.watchdog import Patience
from jtrain.errors import DONE, STOPPED, ConfigError, PeerError, UserError
from jtrain.errors.spelling import did_you_mean


class ManifestEngine(NamedTuple):
    """A program that starts the processes of a run from a manifest."""

    kind: str
    """The manifest's name there."""
    build: Callable[[ClusterJob], dict[str, Any] | list[dict[str, Any]]]
    apply: str
    """The command that starts a manifest in the file NAME.yaml."""


MANIFESTS: Mapping[str, ManifestEngine] = {
    "k8s": ManifestEngine("JobSet", job_set, "kubectl apply --server-side -f {name}.yaml"),
    "trainjob": ManifestEngine("TrainJob", train_job, "kubectl apply --server-side -f {name}.yaml"),
    "skypilot": ManifestEngine("SkyPilot task", sky_task, "sky jobs launch {name}.yaml"),
}
_MANIFEST_OPTIONS = {"restarts", "topology", "image", "name", "claim", "volume"}
# The options that an engine takes.
ENGINES = {
    "local": {"processes", "devices", "restarts", "patience"},
    "ray": {"processes", "devices", "restarts", "address", "env", "resources"},
    "k8s": {*_MANIFEST_OPTIONS, "queue", "select"},
    "trainjob": {*_MANIFEST_OPTIONS, "queue", "select"},
    "skypilot": {*_MANIFEST_OPTIONS, "spot"},
}
_MANIFEST_RESTARTS = 10  # of machines that fail; a mistake, exit code 2, ends the job at once
_LAST_LOG = 5  # seconds after the grace period, to write the last lines of the log


def main(argv: Sequence[str]) -> int:
    """Run the verb; return the exit code of the first process that failed, or 0."""
    parser = _arguments()
    known = parser._option_string_actions  # `--name run`: the value of an option is no verb
    takes_value = {name for name, action in known.items() if action.nargs != 0}
    before = ["", *argv]
    verbs = (i for i, word in enumerate(argv) if word in VERBS and before[i] not in takes_value)
    index = next(verbs, len(argv))
    args = parser.parse(argv[:index])
    args.words, rest = argv[:index], argv[index + 1 :]
    args.verb = argv[index] if index < len(argv) else ""
    if args.command or args.verb in {"", "launch"}:
        raise UserError(_no_verb(next(iter(args.command), args.verb), args.processes))
    _check_options(args, parser)
    if args.engine in MANIFESTS:
        return print_manifest(args, [args.verb, *rest])
    args.program = shlex.join(["jtrain", "launch", *args.words])
    if args.engine == "ray":
        return launch_ray(args, rest)
    return launch(
        [sys.executable, "-m", "jtrain", args.verb, *rest],
        processes=args.processes,
        devices=args.devices,
        restarts=args.restarts or 0,
        patience=Patience.parse(args.patience),
        program=args.program,
    )


def _check_options(args: argparse.Namespace, parser: Arguments) -> None:
    """Raise UserError for an unknown engine, an option it does not take, or too small a number."""
    if args.engine not in ENGINES:
        meant = did_you_mean(args.engine, ENGINES) or "."
        raise UserError(
            f"jtrain launch: no engine {args.engine}; the engines are {', '.join(ENGINES)}{meant}"
        )
    for name in sorted(set().union(*ENGINES.values()) - ENGINES[args.engine]):
        if getattr(args, name) != parser.get_default(name):
            takers = [f"--engine {engine}" for engine, names in ENGINES.items() if name in names]
            raise UserError(
                f"jtrain launch: the engine {args.engine} takes no --{name.replace('_', '-')}; "
                f"leave it out, or type {' or '.join(takers)}"
            )
    for name, least in (("processes", 1), ("devices", 0), ("restarts", 0)):
        if getattr(args, name) is not None and getattr(args, name) < least:
            raise UserError(f"jtrain launch: --{name} is at least {least}; type --{name} 2")


def _no_verb(word: str, processes: int) -> str:
    verbs = [name for name in VERBS if name != "launch"]
    config = word.endswith((".yaml", ".yml"))
    meant = f"; did you mean run {word}?" if config else did_you_mean(word, verbs) or "."
    found = f" {word} is not a verb that launch can run{meant}" if word else ""
    return (
        f"jtrain launch: the verb to run in {processes} processes is missing.{found} Write a verb "
        f"({', '.join(verbs)}): jtrain launch --processes 2 run configs/shakespeare.yaml"
    )


def _arguments() -> Arguments:
    parser = Arguments(
        "launch",
        "Run a verb in several processes on this machine, as several machines would run it: a\n"
        "rehearsal on CPU devices. The processes connect on the loopback only. When one fails or\n"
        "is stuck all are ended, and its output is printed last. With --restarts all are\n"
        "restarted, and a run resumes from its newest valid checkpoint. --engine ray trains\n"
        "by Ray Train on a Ray cluster; --engine k8s and others print a manifest, by which\n"
        "another program starts the processes elsewhere.",
        "--processes 2 --devices 4 run configs/shakespeare.yaml",
        "--processes 4 run configs/shakespeare.yaml parallel.kind=fsdp",
        "--processes 1 --restarts 3 run configs/shakespeare.yaml",
        "--engine ray --processes 4 --restarts 3 run configs/shakespeare.yaml",
        "--engine k8s --topology v5e:4x4 --image IMAGE --claim shared run configs/llama2_7b.yaml",
    )
    words = f"what starts the processes: {', '.join(ENGINES)}; default local"
    parser.add_argument("--engine", default="local", metavar="NAME", help=words)
    words = "number of processes; default 2"
    parser.add_argument("--processes", type=int, default=2, metavar="N", help=words)
    words = "CPU devices of each; default one, or the number in the config"
    parser.add_argument("--devices", type=int, default=0, metavar="N", help=words)
    words = "restarts of all after one failed or was stuck; never after exit code 2"
    parser.add_argument("--restarts", type=int, metavar="N", help=words)
    words = "seconds after which a process is stuck: 60 for all phases, or step=60,compile=600"
    parser.add_argument("--patience", default="", metavar="SECONDS", help=words)
    words = "ray: HOST:PORT of the cluster, auto or local; default RAY_ADDRESS, or local"
    parser.add_argument("--address", default="", metavar="ADDRESS", help=words)
    words = "ray: of each process, such as CPU=4,GPU=1; default a CPU, and a GPU if there are any"
    parser.add_argument("--resources", default="", metavar="NAME=N", help=words)
    words = "ray: names of further variables that the processes get from here"
    parser.add_argument("--env", default="", metavar="NAME,NAME", help=words)
    group = parser.add_argument_group(f"of the engines {', '.join(MANIFESTS)}")
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
    words = "machines that may be taken away, for less money (skypilot; a label for others)"
    group.add_argument("--spot", action="store_true", help=words)
    words = "the verb to run in each, with its arguments"
    parser.add_argument("command", metavar="VERB ...", nargs="*", help=words)
    return parser


def print_manifest(args: argparse.Namespace, command: Sequence[str]) -> int:
    """Print the manifest of `jtrain COMMAND`; return the exit code.

    Raises:
        UserError: if the engine cannot run it; ConfigError for a config that does not fit.
    """
    engine, start = MANIFESTS[args.engine], f"jtrain launch --engine {args.engine}"
    if args.verb != "run":
        raise UserError(
            f"{start}: a manifest is for the verb run, found {args.verb}: {start} --topology "
            f"v5e:4x4 run CONFIG"
        )
    if not args.topology:
        raise UserError(
            f"{start}: the machines are missing. Write --topology v5e:4x4 for a slice of a TPU, "
            f"2*v6e:4x4 for two, h100:8 for a machine of 8 GPUs, 2*h100:8 for two."
        )
    machines = find_machines(args.topology)
    job = _job(args, command, machines)
    built = engine.build(job)
    documents = built if isinstance(built, list) else [built]
    apply = engine.apply.format(name=job.name)
    typed = shlex.join(["jtrain", "launch", *args.words, *command])
    header = f"{engine.kind} of {machines.topology}: {machines.describe()}"
    if machines.tpu and args.engine != "skypilot":
        header += f" ({machines.machine_type} on GKE)"
    print(format_blocks(documents, f"{header}, by\n  {typed}\nStart it: {apply}"), end="")
    print(
        f"jtrain starts nothing on a cluster. Write the manifest to a file, and start it:\n"
        f"  {typed} > {job.name}.yaml\n  {apply}",
        file=sys.stderr,
    )
    return 0


def _job(args: argparse.Namespace, command: Sequence[str], machines: Machines) -> ClusterJob:
    # The config is read as on the cluster, so that its errors come before anything is started.
    from jtrain.cli import run
    from jtrain.config.resolve import resolve
    from jtrain.inspect.plan.topology import check_fills

    run_args = run._arguments().parse(command[1:])
    config = resolve(run_args.config, run_args.settings).config
    check_fills(
        config,
        str(machines.topology),
        platform="tpu" if machines.tpu else "gpu",
        slices=machines.groups,
        hosts=machines.hosts,
        devices=machines.devices,
    )
    return ClusterJob(
        name=args.name or to_label(config.name),
        machines=machines,
        command=("jtrain", *command),
        image=args.image,
        restarts=_MANIFEST_RESTARTS if args.restarts is None else args.restarts,
        claim=args.claim,
        store=config.checkpoint.store,
        volume=args.volume.rstrip("/"),
        queue=args.queue,
        select=_labels(args.select),
        spot=args.spot,
        grace=int(config.checkpoint.grace) + _LAST_LOG,
    )


def _labels(typed: Sequence[str]) -> dict[str, str]:
    """Return labels that were typed as KEY=VALUE; raise ConfigError for other words."""
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


def launch_ray(args: argparse.Namespace, command: Sequence[str]) -> int:
    """Train in the workers of a `JaxTrainer`; return the exit code of `jtrain run`.

    Ray Train starts the workers, joins them into one JAX, and restarts them after a failure.
    """
    options = [word for word in command if word.startswith("-")]
    if args.verb != "run" or options:
        raise UserError(
            f"jtrain launch: --engine ray trains a config, found {' '.join([args.verb, *options])}."
            f" Type --engine ray run CONFIG KEY=VALUE, or leave --engine out"
        )
    config, settings = Arguments("launch --engine ray run", "").config_and_words(command)
    check_installed("jtrain launch: --engine ray", "leave --engine out to run on this machine")
    address = parse_address(args.address, os.environ.get("RAY_ADDRESS", ""))
    requested = parse_resources(args.resources)
    environ = {**forwarded(os.environ, args.env), LAUNCHER: args.program}
    if args.devices:
        environ |= {"JAX_PLATFORMS": "cpu", NUMBER: f"{args.devices}"}
    # Ray's 30 s are too few for workers that import JAX on a busy machine.
    os.environ.setdefault("RAY_TRAIN_WORKER_GROUP_START_TIMEOUT_S", "120")
    cpus = args.processes * max(1, requested.get("CPU", 1))
    with connected(address, cpus, output=True) as ray:
        needed = process_resources(ray, requested if requested or not args.devices else {"CPU": 1})
        _check_resources(needed, args.processes, args.devices)
        if not {"GPU", "TPU"} & set(needed):
            environ["JAX_PLATFORMS"] = "cpu"
        return fit(_trainer(args, config, settings, needed, environ))


def fit(trainer: Any) -> int:
    """Train; return the exit code: that of the run, where a worker reports one.

    Raises:
        UserError: if a worker raised one.
        PeerError: for a failure after the last restart.
    """
    from jtrain.train.ray import RunEndedError, raise_if_mistake, worker_error

    failure: type[Exception] = importlib.import_module("ray.train").TrainingFailedError
    try:
        trainer.fit()
    except failure as error:
        if mistake := getattr(error, "controller_failure", None):
            raise_if_mistake({0: mistake})
        failures = {i: worker_error(e) for i, e in getattr(error, "worker_failures", {}).items()}
        raise_if_mistake(failures)
        ended = [each for each in failures.values() if isinstance(each, RunEndedError)]
        if ended:
            print(ended[0], file=sys.stderr)
            return ended[0].code
        raise PeerError(f"jtrain launch: {error}") from None
    except (KeyboardInterrupt, SystemExit):  # by Ray's own handlers of SIGINT and SIGTERM
        print("the workers were ended by a signal; the same command resumes", file=sys.stderr)
        return STOPPED
    return DONE


def _trainer(
    args: argparse.Namespace,
    config: str,
    settings: Sequence[str],
    needed: Mapping[str, float],
    environ: Mapping[str, str],
) -> Any:
    from jtrain.train.ray import stop_on_mistake, train_loop

    train, jax = (importlib.import_module(f"ray.train{name}") for name in ("", ".v2.jax"))
    config_class = importlib.import_module("ray.train.v2.jax.config").JaxConfig
    gpu, tpu, restarts = "GPU" in needed, "TPU" in needed, args.restarts or 0
    # Newer versions of Ray print each report of each worker otherwise.
    logging_config = getattr(train, "LoggingConfig", None)
    log = {"logging_config": logging_config(log_level="ERROR")} if logging_config else {}
    return jax.JaxTrainer(
        train_loop_per_worker=train_loop,
        train_loop_config={"config": config, "overrides": settings, "directory": os.getcwd()},
        # On CPUs too: without one of the two Ray joins no workers.
        jax_config=config_class(use_gpu=not tpu, use_tpu=tpu),
        scaling_config=train.ScalingConfig(
            num_workers=args.processes, use_gpu=gpu, use_tpu=tpu, resources_per_worker=dict(needed)
        ),
        run_config=train.RunConfig(
            storage_path=str(Path("runs", ".ray").absolute()),
            failure_config=train.FailureConfig(
                max_failures=restarts, controller_failure_limit=restarts + 1
            ),
            callbacks=[stop_on_mistake()],
            worker_runtime_env={"env_vars": dict(environ)},
            **log,
        ),
    )


def _check_resources(needed: Mapping[str, float], processes: int, devices: int) -> None:
    if devices and {"GPU", "TPU"} & set(needed):
        raise UserError(
            f"jtrain launch: --devices {devices} is a number of CPU devices, and --resources gives "
            f"accelerators; leave one of them out: --resources GPU=2 is two GPUs for each process"
        )
    if "TPU" in needed and processes > 1:
        raise UserError(
            "jtrain launch: Ray needs the topology of a TPU slice of several hosts. Write a "
            'JaxTrainer with jt.ray.train_loop and ScalingConfig(use_tpu=True, topology="4x4", '
            'accelerator_type="TPU-V5LITEPOD"), as docs/clusters.md shows'
        )
