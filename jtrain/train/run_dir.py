"""A run's directory: what was asked, how it stands, and whether it may be gone on with."""

import json
import os
import platform
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Mapping
from importlib import metadata
from importlib.metadata import version
from pathlib import Path
from typing import Any, Literal, TypeVar

from jtrain.checkpoint.ownership import RunIdentity
from jtrain.config.dump import dump, to_plain
from jtrain.config.top import BaseConfig
from jtrain.distributed.cluster.command_line import program
from jtrain.errors import ConfigError, DataError
from jtrain.io import jsonl
from jtrain.io.atomic_write import atomic_write
from jtrain.io.disk_errors import disk_advice as disk_advice
from jtrain.io.lost_files import LostFiles
from jtrain.io.private_files import check_no_links
from jtrain.io.redact import redact_values
from jtrain.io.regular_files import open_regular
from jtrain.io.same_file import HeldFolder
from jtrain.train.run_config_check import check_values, find_values
from jtrain.train.run_record import draw_identity, find_facts, find_owner, owner_of, read_record

C = TypeVar("C", bound=BaseConfig)
ENDED = ("done", "failed")  # of a run that has said all that it had to say
PACKAGES = ("jax", "jaxlib", "numpy", "optax", "flax", "orbax-checkpoint", "grain")


class RunDir:
    """`runs/NAME/`: config.yaml, run.json, {metrics,speed,steps}.jsonl, checkpoints/, log.txt.

    And events.jsonl, once a step was bad.
    """

    def __init__(self, path: Path, again: str = "", process: int = 0):
        """`again` is what goes on with the run, where it is not the config in the directory.

        Of several processes the first writes here, and the others each a log of their own.
        """
        self.path, self.first = path, process == 0
        self.config, self.status = path / "config.yaml", path / "run.json"
        self.metrics, self.speed = path / "metrics.jsonl", path / "speed.jsonl"
        self.log = path / ("log.txt" if self.first else f"log-{process}.txt")
        self.samples = path / "samples.txt"
        self.checkpoints = path / "checkpoints"
        self.steps = path / "steps.jsonl"
        self.leaves, self.pictures = path / "leaves.jsonl", path / "pictures"
        self.events = path / "events.jsonl"
        self.again = again or f"{program()} run {self.config}"
        self.lost = LostFiles()
        """What others have removed or cut of these files."""
        self._folder: HeldFolder | None = None  # while a run goes on in it
        self._begun = b""  # what config.yaml says
        self._said: dict[str, Any] = {}  # what run.json says
        self._identity: dict[str, Any] = {}
        self._values: Any = None

    def begin(self, config: BaseConfig) -> None:
        """Takes the directory for a run of these values.

        Raises:
            ConfigError: if it cannot be written.
        """
        if not self.first:
            return
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            text = dump(to_plain(config), f"Every value of this run; to go on: {self.again}")
            self._begun = text.encode()
            atomic_write(self.config, self._begun)
            self._folder = HeldFolder(self.path)
        except OSError as error:
            raise ConfigError(
                f"{self.path}: the run's directory, runs/NAME below where you are, cannot be "
                f"written ({error.strerror}). {disk_advice(error, self.path).words}."
            ) from None
        self._said = self._in_file()
        if self._said.get("status") not in ENDED:  # or its end has told of them
            for line in self._said.get("lost", []):
                self.lost(line)

    def check_files(self) -> None:
        """Make sure that what the run reads and writes here are files that it may write.

        Raises:
            ConfigError: if something else lies under the name of one, or it may not be written.
        """
        replaced = (self.config, self.status)  # whole, so that only their folder is written
        written = (self.metrics, self.speed, self.steps, self.events, self.leaves)
        for file in (*replaced, *written, self.samples, self.log):
            _check_file(file, "rb" if file in replaced else "r+b")
            _check_file(file.with_name(f"{file.name}.new"), "rb")

    def stored(self, schema: type[C]) -> C | None:
        """Return the values of the run that lies here; None if nothing was ever trained.

        Raises:
            ConfigError: if they cannot be had, or are not of the experiment's `schema`.
        """
        check_no_links(self.path)
        return find_values(self.path, schema, self.owner())

    def refuse_another(
        self, config: BaseConfig, disk_advice: str | Callable[[str], str], also: Iterable[str] = ()
    ) -> list[str]:
        """What is otherwise than in the run that lies here, of what may; nothing if there is none.

        Args:
            advice: what to type where values differ that may not; see `check_values`.
            also: dotted keys that may differ beside MAY_DIFFER.

        Raises:
            ConfigError: if a value differs that may not, with each of them.
        """
        check_no_links(self.path)
        words = disk_advice if callable(disk_advice) else lambda settings: disk_advice
        return check_values(self.path, config, self.owner(), words, also)

    def owner(self) -> RunIdentity | None:
        """Return the run that the checkpoints here belong to; None if nothing says it.

        Raises:
            ConfigError: if they are of several runs, and run.json is lost.
        """
        return owner_of(self._identity) or find_owner(self.path)

    def identify(self) -> dict[str, Any]:
        """Return the run's id and the runs that it was copied from, to be told to all processes.

        Raises:
            ConfigError: as `owner`.
        """
        return draw_identity(self.path)

    def adopt(self, identity: Mapping[str, Any], config: BaseConfig) -> RunIdentity:
        """Return the owner of the checkpoints from now on, which run.json and they will say.

        Args:
            identity: what `identify` gave.
            config: the values of the run, as they were given.
        """
        self._identity, self._values = dict(identity), to_plain(config)
        return RunIdentity(identity["id"], identity["ancestors"])

    def sealed(self) -> dict[str, Any]:
        """Return what each checkpoint keeps of the run, under `identity`."""
        facts = self.stands()
        kept = ("tokenizer", "sets", "readers", "seconds_per_step")
        known = {name: facts[name] for name in kept if name in facts}
        return {**self._identity, **known, "config": self._values}

    def refuse_another_tokenizer(self, found: str) -> None:
        """Makes sure that tokens mean what they meant when the run was trained.

        Args:
            found: the fingerprint of the data's tokenizer; empty: it has none.

        Raises:
            DataError: if it is another, with both.
        """
        known = self.stands().get("tokenizer", "")
        if known and found != known:
            raise DataError(
                f"{self.path} was trained on tokens by {known}, and its data now has tokens by "
                f"{found or 'none'}: the same number is another text. Prepare the data again with "
                f"that tokenizer, or start a new run: jtrain run {self.config} "
                f"name={self.path.name}-2"
            )

    def refuse_other_data(self, found: str, another: str, known: Any = None) -> None:
        """Makes sure that a run goes on over the rows that it began with.

        Args:
            found: the fingerprint of what would be trained on; empty: it has none.
            another: what to type for a run of its own.
            known: the fingerprint of the run's data; by default what run.json says.

        Raises:
            DataError: if it is another, with both.
        """
        known = self.stands().get("data", "") if known is None else known
        if known and found and found != known:
            raise DataError(
                f"{self.path} was trained on\n  {known}\nand its data is now\n  {found}\n"
                f"so that its batches would be none of the run. Put the data back as it was. To "
                f"train on over the new data, start a run from the parameters of this one: "
                f"{another} init_from.path={self.path}"
            )

    def stands(self) -> dict[str, Any]:
        """What run.json says, or else the newest checkpoint; empty before the first run."""
        return find_facts(self.path)

    @property
    def id(self) -> str:
        """The random id of the run; empty if it has none."""
        return (self._identity or self.stands()).get("id", "")

    @property
    def pace(self) -> float:
        """Seconds that a step takes, as the run counted its durations in time; 0 if it has none."""
        return self.stands().get("seconds_per_step", 0.0)

    def say(self, status: str, **facts: Any) -> None:
        """Writes that it is running, done, stopped, failed or crashed, and what is known of it.

        What others have removed is written again, and told; nothing is written where the directory
        itself was moved or removed.
        """
        if not self.first or not self._look_after():
            return
        lost = {"lost": list(self.lost.found)} if self.lost.found or "lost" in self._said else {}
        known = self._in_file() or self._said or self.stands()
        said = {**known, **self._identity, **lost, "status": status, **facts}
        self._said = redact_values(said)
        atomic_write(self.status, json.dumps(self._said, indent=2).encode() + b"\n")

    def check_rows(self, marks: Mapping[str, Mapping[str, Any]], step: int) -> None:
        """Takes note of rows that were there when the checkpoint of a step was sealed, and are not.

        Args:
            marks: by the name of a file what was in it then.
        """
        if not self.first:
            return
        for file in (self.metrics, self.steps, self.leaves, self.events):
            mark = marks.get(file.name)
            if mark and (what := jsonl.find_truncation(file, mark)):
                self.lost(f"{what} (as checkpoint {step} knows it)")

    @property
    def is_there(self) -> bool:
        """Whether the directory in which a run began is still under its path."""
        return self._folder is None or self._folder.is_there

    def _in_file(self) -> dict[str, Any]:
        """What run.json itself says; empty where it was removed or damaged."""
        return read_record(self.status).facts

    def _look_after(self) -> bool:
        """Whether the directory is there; what is missing of it is written again, and told."""
        if self._folder is None:  # no run goes on
            return True
        if not self.is_there:
            self.lost(f"{self.path} was moved or removed while the run wrote in it")
            return False
        if not self.config.exists():
            atomic_write(self.config, self._begun)
            self.lost(f"{self.config} was removed while the run went on. It was written again")
        if self._said and not self._in_file():
            self.lost(
                f"{self.status} was removed or damaged while the run went on. It was written again"
            )
        return True


def _check_file(path: Path, mode: Literal["rb", "r+b"]) -> None:
    try:
        open_regular(path, mode).close()
    except (FileNotFoundError, NotADirectoryError):
        return
    except PermissionError:
        raise ConfigError(
            f"{path} is a file of the run, and you may not read and write it. Make it yours: "
            f"chmod u+rw {path}"
        ) from None
    except OSError as error:
        raise ConfigError(f"{path} {error.strerror}. Move it away: mv {path} {path}.old") from None


def environment(devices: list[Any]) -> Mapping[str, Any]:
    """What a result depends on beside the config: versions, devices, and the code's git state."""
    return {
        "jtrain": version("jtrain"),
        "python": platform.python_version(),
        "packages": {name: version_of(name) for name in PACKAGES},
        "devices": [f"{d.platform}:{d.id} {d.device_kind}" for d in devices],
        "machine": f"{platform.machine()}, {os.cpu_count()} processors",
        "git": _git(),
        "argv": sys.argv,
        "started": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
    }


def version_of(package: str) -> str:
    """That is installed; empty if it is not."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return ""


def _git() -> str:
    """The commit of the code that runs here, and whether files of it are changed; or empty."""
    command = ["git", "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"]
    try:
        got = subprocess.run(command, capture_output=True, text=True, timeout=5, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return got.stdout.strip() if got.returncode == 0 else ""
