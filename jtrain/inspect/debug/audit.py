"""Audit of a run: steps drawn at random are computed again, its files checked by a certificate.

A certificate is a small text about a run's values, code, data, recorded steps and checkpoints. A
signature of it, by `ssh-keygen -Y sign`, shows that none of them was changed after it was made.
"""

import dataclasses
import hashlib
import json
import random
import secrets
import subprocess
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from jtrain.checkpoint import inspect, layout
from jtrain.config.node import FILE, without_origins
from jtrain.config.precision import F32
from jtrain.config.read import read
from jtrain.distributed.multihost import broadcast_from_first
from jtrain.errors import CheckpointError, ConfigError, UserError
from jtrain.inspect.debug.replay import replay
from jtrain.io.regular_files import atomic_write, read_bytes
from jtrain.train.experiment import RunConfig
from jtrain.train.hooks.step_record import read_step_records
from jtrain.train.processes import join_run
from jtrain.train.run_dir import RunDir

REACH = 50
"""Steps after a checkpoint that are drawn: each is computed from the checkpoint on."""
HEAD, END, NAMESPACE = "jtrain certificate 1", "end", "jtrain"
MAX_BYTES = 1 << 20


@dataclasses.dataclass(frozen=True)
class AuditedStep:
    """A step that was computed again, with those between it and the checkpoint before it."""

    step: int
    start: int
    """Step of the checkpoint; 0: the initial state."""
    same_bits: bool
    distance: float
    """Largest relative difference of a loss or a norm."""
    fault: str
    """What differs from the run; empty: nothing."""


@dataclasses.dataclass(frozen=True)
class AuditResult:
    """What an audit found."""

    steps: Sequence[AuditedStep]
    tolerance: float
    seed: int
    beyond: int
    """Recorded steps that are more than `REACH` after a checkpoint: none of them is drawn."""
    certificate: str
    """What the certificate says; empty without one."""
    faults: Sequence[str]
    """Each difference between the run and its certificate."""

    @property
    def passed(self) -> bool:
        """Whether nothing differs."""
        return not self.faults and not any(each.fault for each in self.steps)


def audit(
    config: RunConfig,
    path: Path,
    *,
    steps: int,
    seed: int | None,
    tolerance: float | None,
    log: Callable[[str], None],
) -> AuditResult:
    """Compute steps of a run again, on the devices here, and hold its files to its certificate.

    Args:
        steps: number of steps to draw, each at most `REACH` after a checkpoint or the beginning.
        seed: of the drawing; None: another one each time.
        tolerance: relative, of the loss and the norms; None: 1e-5 in float32, else 2e-2.

    Raises:
        ConfigError: if the run has no recorded steps, or its values are others.
        CheckpointError: if the certificate was cut, or the run's files cannot be read.
    """
    if tolerance is None:
        tolerance = 1e-5 if isinstance(config.precision, F32) else 2e-2
    run_dir = RunDir(path)
    certificate, faults = check_certificate(run_dir)
    if seed is None:
        join_run(config, path, trains=False)
        seed = int(broadcast_from_first(lambda: {"seed": secrets.randbits(32)})["seed"])
    drawn, beyond = draw_steps(run_dir, steps, seed)
    found = [_audit_step(config, path, step, tolerance, log) for step in drawn]
    return AuditResult(found, tolerance, seed, beyond, certificate, faults)


def draw_steps(run_dir: RunDir, count: int, seed: int) -> tuple[list[int], int]:
    """Return recorded steps at random, in order, and the number of those that cannot be drawn.

    Steps are fewer than `count` if the run has fewer.

    Raises:
        ConfigError: if there is none.
    """
    recorded = read_step_records(run_dir.steps)
    starts = [0, *layout.list_steps(run_dir.checkpoints, run_dir.owner())]
    near = {start + i for start in starts for i in range(1, REACH + 1)} & recorded.keys()
    if not near:
        raise ConfigError(
            f"{run_dir.path} has no recorded step to compute again: {run_dir.steps} has none. "
            f"Train it first: {run_dir.resume_command}"
        )
    drawn = sorted(random.Random(seed).sample(sorted(near), min(count, len(near))))
    return drawn, len(recorded) - len(near)


def _audit_step(
    config: RunConfig, path: Path, step: int, tolerance: float, log: Callable[[str], None]
) -> AuditedStep:
    found = replay(config, path, step, log=log, tolerance=tolerance)
    distance, fault = found.farthest[0], found.describe_difference()
    return AuditedStep(step, found.start, not (fault or distance), distance, fault)


def certify(run_dir: RunDir, key: Path | None = None) -> Path:
    """Write the run's certificate, and sign it by an SSH key; return its path.

    Raises:
        ConfigError: if the run has no recorded steps.
        UserError: if ssh-keygen does not sign.
    """
    last = max(read_step_records(run_dir.steps), default=0)
    if not last:
        raise ConfigError(
            f"{run_dir.path} has no recorded step; train it: {run_dir.resume_command}"
        )
    path = certificate_path(run_dir)
    steps = layout.list_steps(run_dir.checkpoints, run_dir.owner())
    lines = [HEAD, *_facts(run_dir), _steps_line(run_dir, last), *_states(run_dir, steps), END]
    atomic_write(path, "".join(f"{line}\n" for line in lines).encode())
    _signature(path).unlink(missing_ok=True)
    if key is not None:
        _ssh_keygen("sign", "-f", str(key), str(path))
    return path


def certificate_path(run_dir: RunDir) -> Path:
    """Return the path of a run's certificate."""
    return run_dir.path / "certificate.txt"


def check_certificate(run_dir: RunDir) -> tuple[str, list[str]]:
    """Return what a run's certificate says, and each line that does not hold.

    Raises:
        CheckpointError: if the certificate was cut.
    """
    path = certificate_path(run_dir)
    if not path.exists():
        return "", []
    text = read_bytes(path, most=MAX_BYTES, inside=run_dir.path)
    lines = text.decode("utf-8", "replace").splitlines()
    if lines[:1] != [HEAD] or lines[-1:] != [END]:
        raise CheckpointError(
            f"{path} is not a whole certificate: its first line is `{HEAD}` and its last `{END}`. "
            f"Get the file again from whoever certified the run, or remove it"
        )
    said = _by_name(lines[1:-1])
    last = max((int(name.split()[1]) for name in said if name.startswith("steps ")), default=0)
    states = [int(name.split()[1]) for name in said if name.startswith("state ")]
    kept = set(layout.list_steps(run_dir.checkpoints, run_dir.owner()))
    now = [*_facts(run_dir), _steps_line(run_dir, last), *_states(run_dir, kept & set(states))]
    found = _by_name(now)
    faults = [
        f"{name}: not that of the certificate" for name in found if found[name] != said.get(name)
    ]
    if faults == ["config: not that of the certificate"]:
        faults[0] += f"; if you trained it longer, remove {path} and certify the run again"
    summary = f"steps 1 to {last}, {len(kept & set(states))} of {len(states)} states still there"
    if _signature(path).exists():
        try:
            told = _ssh_keygen("check-novalidate", "-s", str(_signature(path)), text=text)
            summary += f"; {told.strip()}"
        except UserError as error:
            faults.append(f"signature: {error}")
    return summary, faults


def _by_name(lines: Iterable[str]) -> dict[str, str]:
    """Return the last word of each line by the words before it."""
    return {name: word for name, _, word in (line.rpartition(" ") for line in lines)}


def _facts(run_dir: RunDir) -> list[str]:
    """Return a line for each of the run's identity, values, code, data and versions."""
    facts = run_dir.facts()
    named = {name: facts.get(name) for name in ("id", "code", "data", "packages")}
    named["config"] = without_origins(read(run_dir.config, FILE)[0])
    return [f"{name} {_digest(value)}" for name, value in named.items()]


def _steps_line(run_dir: RunDir, last: int) -> str:
    """Return the line of the recorded numbers and batches of all steps up to `last`."""
    known = read_step_records(run_dir.steps)
    return f"steps {last} {_digest([[n, *known[n]] for n in sorted(known) if n <= last])}"


def _states(run_dir: RunDir, steps: Iterable[int]) -> list[str]:
    """Return a line for each checkpoint, of the fingerprints of its leaves."""
    prints = lambda step: inspect.describe_checkpoint(run_dir.checkpoints, step)["leaves"]
    return [f"state {step} {_digest(prints(step))}" for step in sorted(steps)]


def _digest(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True, default=str).encode()).hexdigest()


def _signature(path: Path) -> Path:
    return path.with_name(f"{path.name}.sig")


def _ssh_keygen(action: str, *words: str, text: bytes = b"") -> str:
    command = ["ssh-keygen", "-Y", action, "-n", NAMESPACE, *words]
    try:
        done = subprocess.run(command, input=text, capture_output=True, check=False)
    except OSError as error:
        raise UserError(
            f"ssh-keygen cannot be started ({error.strerror}): install OpenSSH"
        ) from None
    if done.returncode:
        raise UserError(f"{' '.join(command)}: {(done.stderr or done.stdout).decode().strip()}")
    return done.stdout.decode()
