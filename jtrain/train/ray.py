"""Ray Train: `jt.ray.train_loop` is the training loop of a `JaxTrainer`.

    trainer = JaxTrainer(
        train_loop_per_worker=jt.ray.train_loop,
        train_loop_config={"config": "configs/shakespeare.yaml", "overrides": ["steps=100"]},
        scaling_config=ScalingConfig(num_workers=4, use_gpu=True),
        run_config=RunConfig(
            failure_config=FailureConfig(max_failures=3), callbacks=[jt.ray.stop_on_mistake()]
        ),
    )
    trainer.fit()

Ray Train starts the workers and joins them into one JAX before it calls the loop.
"""

import importlib
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax

from jtrain.config.resolve import resolve
from jtrain.config.top import RUNS
from jtrain.core.loop import Hook
from jtrain.distributed.cluster.cluster import difference
from jtrain.distributed.multihost import all_gather
from jtrain.errors import FAULT, STOPPED, ConfigError, UserError
from jtrain.errors.spelling import did_you_mean
from jtrain.train.experiment import RunConfig
from jtrain.train.hooks.function_hooks import on_numbers, on_results
from jtrain.train.processes import check_devices, process_facts
from jtrain.train.run import run

_KEYS = ("config", "overrides", "directory")
_EXAMPLE = '{"config": "configs/shakespeare.yaml", "overrides": ["steps=100"]}'


class RunEndedError(RuntimeError):
    """A run that ended before its last step: Ray Train restarts its workers, and it resumes."""

    code = FAULT
    """Exit code of `jtrain run`."""


def train_loop(config: Mapping[str, Any]) -> None:
    """Train a config in a worker of Ray Train, or resume its run; report its metrics to Ray.

    The run has its directory and its checkpoints in runs/NAME, as under `jtrain run`; Ray gets the
    metrics of every `log.every` steps and of each evaluation, and no checkpoint. All workers need
    one shared file system.

    Args:
        config: `config`, a YAML file; `overrides`, values such as `steps=100`; `directory`, the
            working directory in each worker: by default that of the driver, if the file is in it.

    Raises:
        UserError: for what a restart would not mend; `stop_on_mistake` ends the restarts.
        RunEndedError: if the run was asked to end, or failed, and a restart resumes it.
    """
    path, overrides, directory = _parse(config)
    os.chdir(working_directory(path, directory, sys.path))
    train = importlib.import_module("ray.train")
    _check_joined_by_ray(train.get_context().get_world_size())
    resolved = resolve(Path(path), list(overrides))
    if jax.process_count() > 1:
        _check_processes(resolved.config, RUNS / resolved.config.name)
    hooks = _reports(train.report, resolved.config.log.every)
    outcome = run(resolved.config, source=resolved.path, hooks=hooks)
    if outcome.status != "done":
        why = f": {outcome.why}" if outcome.why else ""
        code = f" (exit code {STOPPED} of jtrain run)" if outcome.status == "stopped" else ""
        error = RunEndedError(f"the run {outcome.status} at step {outcome.step}{code}{why}")
        error.code = STOPPED if outcome.status == "stopped" else FAULT
        raise error


def stop_on_mistake() -> Any:
    """Return a callback for `RunConfig(callbacks=[...])`: a user error ends the trainer.

    Ray Train restarts the workers after any error, `max_failures` times, and an error in the
    config would fail again each time.
    """
    base: type = importlib.import_module("ray.train").UserCallback

    class StopOnMistake(base):
        def after_exception(self, run_context: Any, worker_exceptions: Mapping[int, Any]) -> None:
            del run_context
            raise_if_mistake(worker_exceptions)

    return StopOnMistake()


def raise_if_mistake(errors: Mapping[int, Any]) -> None:
    """Raise the first user error among those of the workers, if there is one."""
    for _, error in sorted(errors.items()):
        cause = worker_error(error)
        if isinstance(cause, UserError):
            raise cause


def worker_error(error: Any) -> Any:
    """Return the error that a worker raised: Ray wraps it with its traceback."""
    return getattr(error, "_base_exc", error)


def _parse(config: Mapping[str, Any]) -> tuple[str, Sequence[str], str]:
    unknown = [key for key in config if key not in _KEYS]
    if unknown:
        raise ConfigError(
            f"train_loop_config has no key {unknown[0]}; its keys are {', '.join(_KEYS)}"
            f"{did_you_mean(unknown[0], _KEYS) or '.'} For example {_EXAMPLE}"
        )
    path, overrides = config.get("config"), config.get("overrides", [])
    if not isinstance(path, str) or not path:
        raise ConfigError(
            f"train_loop_config: config is the path of a YAML file, found {path!r}. Write "
            f"train_loop_config={_EXAMPLE}"
        )
    if isinstance(overrides, str) or not all(isinstance(each, str) for each in overrides):
        raise ConfigError(
            f"train_loop_config: overrides is a list of texts, found {overrides!r}. Write "
            f"train_loop_config={_EXAMPLE}"
        )
    return path, overrides, config.get("directory", "")


def working_directory(path: str, directory: str, search: Sequence[str]) -> Path:
    """Return the directory to train in: Ray Train itself works in a folder of its own.

    Args:
        directory: what was asked for; empty: the first of `search` that has the file. Ray puts the
            working directory of the driver on the import path of its workers.

    Raises:
        ConfigError: if there is none.
    """
    if directory:
        if not Path(directory).is_dir():
            raise ConfigError(
                f"train_loop_config: the directory {directory} does not exist on this worker. Name "
                f"one in a file system that all workers share."
            )
        return Path(directory)
    found = [Path(folder) for folder in search if folder and Path(folder, path).is_file()]
    if not found or Path(path).is_absolute():
        why = "does not say in which directory to train" if found else "was not found"
        raise ConfigError(
            f"train_loop_config: {path} {why}; the run is in runs/NAME of a directory that all "
            f'workers share. Write "directory": "/shared/project" beside "config".'
        )
    return found[0]


def _check_joined_by_ray(workers: int) -> None:
    """Raise unless Ray Train has joined its workers: otherwise each would train by itself."""
    if workers > 1 and not jax.distributed.is_initialized():
        raise ConfigError(
            f"Ray Train started {workers} workers and did not join them, so that each would train "
            f"by itself. Write ScalingConfig(use_gpu=True) or use_tpu=True; on CPUs "
            f"jax_config=JaxConfig(use_gpu=True) and "
            f'RunConfig(worker_runtime_env={{"env_vars": {{"JAX_PLATFORMS": "cpu"}}}}).'
        )


def _check_processes(config: RunConfig, path: Path) -> None:
    """Compare the processes that Ray has joined, as `join_run` does before it joins them."""
    facts = all_gather(process_facts(config, path))
    for index, other in enumerate(facts):
        if error := difference(facts[0], other, index):
            raise error
    check_devices()


def _reports(report: Any, every: int) -> list[Hook]:
    """Return hooks that report to Ray; they run in all processes, which Ray asks for."""

    def report_numbers(step: int, numbers: Mapping[str, float]) -> None:
        report({"step": step, **{name: float(value) for name, value in numbers.items()}})

    return [on_numbers(report_numbers, every=every), on_results(report_numbers)]
