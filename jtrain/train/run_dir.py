"""Run directory: the files of a run, its config and status, and whether it may be resumed."""

import json
import os
import platform
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Literal, TypeVar

from jtrain.checkpoint.ownership import RunIdentity
from jtrain.config.dump import dump, to_plain
from jtrain.config.top import BaseConfig
from jtrain.distributed.cluster.cluster import program
from jtrain.distributed.compiler_flags import VARIABLES
from jtrain.errors import ConfigError, DataError
from jtrain.io.disk_errors import attempt
from jtrain.io.disk_errors import disk_advice as disk_advice
from jtrain.io.environment import in_runs, installed_version, jtrain_version
from jtrain.io.redact import redact_values
from jtrain.io.regular_files import FACTS, NEW, atomic_write, check_no_links, open_regular
from jtrain.train.run_config_check import MatchedConfig, find_values, match_values
from jtrain.train.run_record import draw_identity, find_facts, find_owner, get_owner

C = TypeVar("C", bound=BaseConfig)
PACKAGES = ("jax", "jaxlib", "numpy", "optax", "flax", "orbax-checkpoint", "grain")


class RunDir:
    """Files in `runs/NAME/`: config.yaml, run.json, log.txt, checkpoints/ and more.

    Numbers are in metrics.jsonl, speed.jsonl, time.jsonl and steps.jsonl, what was compiled in
    compiles.jsonl; events.jsonl is created at the first bad step.
    """

    def __init__(self, path: Path, again: str = "", process: int = 0):
        """Name the files of a run; nothing is created.

        Args:
            again: the command that resumes the run, if it is not one with the directory's config.
            process: the first process writes the files; each other one only writes a log.
        """
        self.path, self.first = path, process == 0
        self.config, self.status = path / "config.yaml", path / "run.json"
        self.metrics, self.speed = path / "metrics.jsonl", path / "speed.jsonl"
        self.log = path / ("log.txt" if self.first else f"log-{process}.txt")
        self.samples = path / "samples.txt"
        self.checkpoints = path / "checkpoints"
        self.steps, self.times = path / "steps.jsonl", path / "time.jsonl"
        self.leaves, self.pictures = path / "leaves.jsonl", path / "pictures"
        self.events, self.compiles = path / "events.jsonl", path / "compiles.jsonl"
        self.resume_command = again or f"{program()} run {self.config}"
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

    def check_files(self) -> None:
        """Raise unless the files of the run, as far as they exist, are writable files.

        Raises:
            ConfigError: if one is something else than a file, or is not writable.
        """
        replaced = (self.config, self.status)  # as a whole, which only needs a writable folder
        written = (self.metrics, self.speed, self.times, self.steps, self.events, self.leaves)
        written += (self.compiles,)
        for file in (*replaced, *written, self.samples, self.log):
            _check_file(file, "rb" if file in replaced else "r+b")
            _check_file(file.with_name(file.name + NEW), "rb")

    def stored(self, schema: type[C]) -> C | None:
        """Return the config of the stored run; None if nothing was ever trained here.

        Raises:
            ConfigError: if it cannot be read, or does not fit the experiment's `schema`.
        """
        check_no_links(self.path)
        return find_values(self.path, schema, self.owner())

    def match(self, config: C, advice: str | Callable[[str], str]) -> MatchedConfig[C]:
        """Match a config with the stored run.

        Args:
            advice: what to type if values differ that must not; see `match_values`.

        Raises:
            ConfigError: if values differ that must not, with each of them.
        """
        check_no_links(self.path)
        advise = advice if callable(advice) else lambda settings: advice
        return match_values(self.path, config, self.owner(), advise)

    def owner(self) -> RunIdentity | None:
        """Return the run that owns the checkpoints; None if no file names it.

        Raises:
            ConfigError: if the checkpoints are of several runs, and run.json is lost.
        """
        return get_owner(self._identity) or find_owner(self.path)

    def identify(self) -> dict[str, Any]:
        """Return the run's id and the runs that it was copied from, to broadcast to all processes.

        Raises:
            ConfigError: as `owner`.
        """
        return draw_identity(self.path)

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
        names = ("tokenizer", "sets", "readers", "seconds_per_step", "code")
        known = {name: facts[name] for name in names if name in facts}
        return {**self._identity, **known, "config": self._values}

    def check_tokenizer(self, found: str) -> None:
        """Raise unless the data has the tokenizer that the run was trained with.

        Args:
            found: fingerprint of the data's tokenizer; empty: it has none.

        Raises:
            DataError: if the tokenizer differs, with both fingerprints.
        """
        known = self.facts().get("tokenizer", "")
        if known and found != known:
            raise DataError(
                f"{self.path} was trained on tokens by {known}, and its data now has tokens by "
                f"{found or 'none'}: the same token is a different text. Prepare the data again "
                f"with that tokenizer, or start a new run: jtrain run {self.config} "
                f"name={self.path.name}-2"
            )

    def check_data(self, found: str, another: str, known: Any = None) -> None:
        """Raise unless the data is that of the stored run.

        Args:
            found: fingerprint of the data; empty: it has none.
            another: the command that starts a new run.
            known: fingerprint of the run's data; by default that in run.json.

        Raises:
            DataError: if the data differs, with both fingerprints.
        """
        known = self.facts().get("data", "") if known is None else known
        if known and found and found != known:
            raise DataError(
                f"{self.path} was trained on\n  {known}\nand its data is now\n  {found}\n"
                f"so that the run would get other batches. Put the data back as it was. To "
                f"continue training on the new data, start a run from the parameters of this one: "
                f"{another} init_from.path={self.path}"
            )

    def facts(self) -> dict[str, Any]:
        """Return the facts in run.json, or else in the newest checkpoint; {} without a run."""
        return find_facts(self.path)

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


def check_name(path: Path) -> None:
    """Raise unless the path of a run's directory can be written in UTF-8, as JAX and Orbax do.

    Raises:
        ConfigError: if it cannot.
    """
    whole = path.absolute()
    try:
        str(whole).encode()
    except UnicodeEncodeError:
        encoding = sys.getfilesystemencoding()
        utf8 = "" if encoding == "utf-8" else f"export PYTHONUTF8=1 (names are {encoding} now), or "
        raise ConfigError(
            f"{os.fsencode(whole)!r}: the path of the run's directory is not UTF-8, so that no "
            f"checkpoint can be written: {utf8}rename the folder or train in another one."
        ) from None


def _check_file(path: Path, mode: Literal["rb", "r+b"]) -> None:
    try:
        attempt(path, lambda: open_regular(path, mode).close())
    except (FileNotFoundError, NotADirectoryError):
        return
    except PermissionError:
        raise ConfigError(
            f"{path} is a file of the run, and you have no permission to read and write it. Type: "
            f"chmod u+rw {path}"
        ) from None
    except OSError as error:
        words = f"{error.strerror}. Move it away: mv {path} {path}.old"
        if not isinstance(error, FACTS):  # a file with rows stays where it is
            words = f"cannot be written ({error.strerror}). {disk_advice(error, path).words}."
        raise ConfigError(f"{path} {words}") from None


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
