"""Run directory: the files of a run, the facts about it in run.json, and its identity.

run.json may be lost or damaged. What a run needs of it (its id, its values, its data) is therefore
sealed into each checkpoint too, under `identity`, and the newest checkpoint replaces a run.json
without an id.
"""

import json
import os
import platform
import subprocess
import sys
import time
import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, NamedTuple, TypeAlias

from pydantic import BaseModel, Field, ValidationError

from jtrain.checkpoint import layout
from jtrain.checkpoint.ownership import RunIdentity
from jtrain.config.dump import dump, to_plain
from jtrain.config.top import RUNS, BaseConfig
from jtrain.distributed.cluster.cluster import command_words
from jtrain.distributed.compiler_flags import VARIABLES
from jtrain.errors import CheckpointError, ConfigError, DataError, UnreachableError
from jtrain.errors.spelling import did_you_mean
from jtrain.io.disk_errors import attempt, disk_advice
from jtrain.io.environment import in_runs, installed_version, is_run, jtrain_version
from jtrain.io.hub import pin_commits
from jtrain.io.object_store import check_local_run
from jtrain.io.redact import redact_values
from jtrain.io.regular_files import atomic_write, read_json

PACKAGES = ("jax", "jaxlib", "numpy", "optax", "flax", "orbax-checkpoint", "grain")
IDENTITY = "identity"
MAX_BYTES = 1 << 24  # of a run.json


class CheckpointRecord(NamedTuple):
    """Facts about a run in one of its checkpoints."""

    step: int
    facts: dict[str, Any]
    """As in run.json."""
    values: Any
    """Config as it was given."""


class RunDir:
    """Files in `runs/NAME/`: config.yaml, run.json, log.txt, checkpoints/ and more.

    Numbers are in metrics.jsonl, speed.jsonl, time.jsonl and steps.jsonl;
    events.jsonl is created at the first bad step.
    """

    def __init__(self, path: Path, resume_command: str = "", process: int = 0):
        """Name the files of a run; nothing is created.

        Args:
            resume_command: how to resume the run; by default `jtrain run` of its config.
            process: the first process writes the files; each other one only writes a log.
        """
        self.path, self.first = path, process == 0
        self.config, self.status = path / "config.yaml", path / "run.json"
        self.metrics, self.speed = path / "metrics.jsonl", path / "speed.jsonl"
        self.log = path / ("log.txt" if self.first else f"log-{process}.txt")
        self.samples = path / "samples.txt"
        self.checkpoints = path / "checkpoints"
        self.steps, self.times = path / "steps.jsonl", path / "time.jsonl"
        self.pictures = path / "pictures"
        self.events = path / "events.jsonl"
        self.resume_command = resume_command or f"{command_words()} run {self.config}"
        self._identity: dict[str, Any] = {}
        self._values: Any = None

    def begin(self, config: BaseConfig) -> None:
        """Create the directory for a run of these values.

        Raises:
            ConfigError: if it cannot be written.
        """
        if not self.first:
            return
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            heading = f"Every value of this run; to resume: {self.resume_command}"
            atomic_write(self.config, dump(to_plain(config), heading).encode())
        except OSError as error:
            raise ConfigError(
                f"{self.path}: the run's directory, runs/NAME below where you are, cannot be "
                f"written ({error.strerror}). {disk_advice(error, self.path).words}."
            ) from None

    def facts(self) -> dict[str, Any]:
        """Return the facts in run.json, or else in the newest checkpoint; {} without a run.

        Raises:
            UnreachableError: if a file is there and cannot be read now.
        """
        found = self.read_status()
        newest = None if "id" in found else self.newest_record(None)
        return {**newest.facts, **found} if newest else found

    def read_status(self) -> dict[str, Any]:
        """Return the facts in run.json that have their type; {} if it is missing or damaged."""
        read = lambda: read_json(self.status, most=MAX_BYTES, inside=self.path)
        try:
            found = attempt(self.status, read)
        except UnreachableError:
            raise
        except (OSError, ValueError):
            return {}
        return _typed(found) if isinstance(found, dict) else {}

    def newest_record(self, owner: RunIdentity | None) -> CheckpointRecord | None:
        """Return the facts in the newest readable checkpoint of a run; None of any run."""
        for step in reversed(layout.list_named_steps(self.checkpoints)):
            if layout.is_foreign(self.checkpoints, step, owner):
                continue
            try:
                about = layout.read_record(self.checkpoints, step)["about"]
            except CheckpointError:  # damaged, or deleted in the meantime
                continue
            identity = about.get(IDENTITY)
            if isinstance(identity, dict) and "config" in identity:
                facts = _typed({"data": about.get("data"), **identity})
                return CheckpointRecord(step, facts, identity["config"])
        return None

    def owner(self) -> RunIdentity | None:
        """Return the run that owns the checkpoints; None if no file names it."""
        facts = self._identity or self.facts()
        return RunIdentity(facts["id"], facts.get("ancestors", {})) if "id" in facts else None

    def identify(self) -> dict[str, Any]:
        """Return the run's id and the runs that it was copied from, to broadcast to all processes.

        A directory with another name than the run had is another run: a copy, which owns the
        checkpoints that were copied. The place is the last two names of the path, so that the
        folder of all runs may be moved.
        """
        owner, place = self.owner(), os.sep.join(self.path.absolute().parts[-2:])
        if owner is None:
            return {"id": str(uuid.uuid4()), "ancestors": {}, "place": place}
        if self.facts().get("place", place) == place:
            return {"id": owner.run, "ancestors": dict(owner.ancestors), "place": place}
        steps = layout.list_named_steps(self.checkpoints)
        copied = [s for s in steps if not layout.is_foreign(self.checkpoints, s, owner)]
        ancestors = {**owner.ancestors, **({owner.run: copied[-1]} if copied else {})}
        return {"id": str(uuid.uuid4()), "ancestors": ancestors, "place": place}

    def adopt(self, identity: Mapping[str, Any], config: BaseConfig) -> RunIdentity:
        """Set the identity, for run.json and the checkpoints, and return the checkpoints' owner.

        Args:
            identity: the result of `identify`.
            config: the values of the run, as they were given.
        """
        self._identity, self._values = dict(identity), to_plain(config)
        return RunIdentity(identity["id"], identity["ancestors"])

    def sealed(self) -> dict[str, Any]:
        """Return the facts about the run that each checkpoint holds, under `identity`."""
        facts = self.facts()
        names = ("tokenizer", "hub", "sets", "readers", "seconds_per_step", "code")
        known = {name: facts[name] for name in names if name in facts}
        return {**self._identity, **known, "config": self._values}

    def pin_models(self) -> None:
        """Let names on the Hub stand for the commits that the run started from."""
        pin_commits(self.facts().get("hub", {}))

    def check_tokenizer(self, found: str) -> None:
        """Raise DataError unless the data has the tokenizer that the run was trained with.

        Args:
            found: fingerprint of the data's tokenizer; empty: it has none.
        """
        known = self.facts().get("tokenizer", "")
        if known and found != known:
            raise DataError(
                f"{self.path} was trained on tokens by {known}, and its data now has tokens by "
                f"{found or 'none'}: the same token is a different text. Prepare the data again "
                f"with that tokenizer, or start a new run: jtrain run {self.config} "
                f"name={self.path.name}-2"
            )

    def check_data(self, found: str, new_run: str) -> None:
        """Raise DataError unless the data is that of the stored run.

        Args:
            found: fingerprint of the data; empty: it has none.
            new_run: how to start a new run.
        """
        known = self.facts().get("data", "")
        if known and found and found != known:
            raise DataError(
                f"{self.path} was trained on\n  {known}\nand its data is now\n  {found}\n"
                f"so that the run would get other batches. Put the data back as it was. To "
                f"continue training on the new data, start a run from the parameters of this one: "
                f"{new_run} init_from.path={self.path}"
            )

    @property
    def id(self) -> str:
        """Random id of the run; empty if it has none."""
        return (self._identity or self.facts()).get("id", "")

    @property
    def pace(self) -> float:
        """Seconds per step by which the run converted its durations in time; 0 if it has none."""
        return self.facts().get("seconds_per_step", 0.0)

    def write_status(self, status: str, **facts: Any) -> None:
        """Write run.json: running, done, stopped, failed or crashed, and facts about the run.

        Nothing is written in a directory that was moved or removed.
        """
        if self.first and self.path.is_dir():
            record = {**self.facts(), **self._identity, "status": status, **facts}
            atomic_write(self.status, json.dumps(redact_values(record), indent=2).encode() + b"\n")


Count: TypeAlias = Annotated[int, Field(ge=0, lt=2**63)]
Seconds: TypeAlias = Annotated[float, Field(ge=0, lt=1e12)]


class _Facts(BaseModel, strict=True):
    """Types of the facts in run.json: one of another type counts as missing."""

    status: str = ""
    step: Count = 0
    why: str = ""
    id: Annotated[str, Field(min_length=1, max_length=100)] = "-"
    ancestors: dict[str, Count] = {}
    place: str = ""
    readers: list[Annotated[list[Count], Field(min_length=2, max_length=2)]] = []
    sets: list[str] = []
    data: str = ""
    tokenizer: str = ""
    hub: dict[str, str] = {}
    code: dict[str, str] = {}
    flags: dict[str, str] = {}
    devices: list[str] = []
    seconds_per_step: Seconds = 0.0
    seconds_per_save: Seconds = 0.0


def _typed(found: Mapping[str, Any]) -> dict[str, Any]:
    try:
        _Facts.model_validate(found)
    except ValidationError as error:
        wrong = {each["loc"][0] for each in error.errors(include_url=False)}
        return {name: fact for name, fact in found.items() if name not in wrong}
    return dict(found)


def find_run(run: Path | str, asked: str) -> Path:
    """Return the directory of a run, by its path or by its name in runs/.

    Args:
        asked: name of the caller, for the message.

    Raises:
        ConfigError: if there is no such run, with the existing ones.
    """
    check_local_run(run, asked)
    for directory in (Path(run), RUNS / run):
        # Elsewhere a config.yaml alone may be a study's, whose experiments/ are its code.
        named = in_runs(os.path.abspath(directory)) and (directory / "config.yaml").is_file()
        if named or is_run(directory):
            return directory
    names = sorted(path.parent.name for path in RUNS.glob("*/config.yaml"))
    raise ConfigError(
        f"{asked}: {run} is not a directory of a run; in {RUNS}/ there is "
        f"{', '.join(names) or 'none: train one by jtrain run CONFIG'}"
        f"{did_you_mean(Path(run).name, names)}"
    )


def get_environment(devices: list[Any]) -> Mapping[str, Any]:
    """Return what a result depends on besides the config: versions, devices, the git state."""
    return {
        "jtrain": jtrain_version(),
        "python": platform.python_version(),
        "packages": {name: installed_version(name) for name in PACKAGES},
        "devices": [f"{d.platform}:{d.id} {d.device_kind}" for d in devices],
        "flags": {name: os.environ[name] for name in VARIABLES if os.environ.get(name)},
        "machine": f"{platform.machine()}, {os.cpu_count()} processors",
        "git": _git(),
        "argv": sys.argv,
        "started": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
    }


def _git() -> str:
    """Return the commit of the code, with -dirty if files are changed; "" without a repository.

    Within a run it is "": a repository's own settings name programs that git runs.
    """
    if in_runs(os.getcwd()):
        return ""
    command = ["git", "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"]
    try:
        result = subprocess.run(command, capture_output=True, text=True, timeout=5, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return result.stdout.strip() if result.returncode == 0 else ""
