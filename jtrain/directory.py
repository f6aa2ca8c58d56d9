"""A run's directory: what was asked, how it stands, and whether it may be gone on with."""

import json
import os
import platform
import subprocess
import sys
import time
from collections.abc import Mapping
from importlib import metadata
from pathlib import Path
from typing import Any

from jtrain.config.dump import differences, dump, told
from jtrain.config.resolve import resolve
from jtrain.config.top import Top
from jtrain.config.words import spell
from jtrain.errors import ConfigError, DataError
from jtrain.hooks.rewrite import rewrite
from jtrain.private import refuse_links
from jtrain.redact import redacted_values
from jtrain.version import __version__

# What changes no number that a run computes from its state on, so a run may go on with others; and
# what it does about a bad step, for a run that one has stopped goes on with another answer.
# A copy of a run goes on under its own name.
MAY_DIFFER = (
    "parallel",
    "workers",
    "checkpoint",
    "trackers",
    "evaluate",
    "log",
    "guard",
    "checks",
    "name",
)
PACKAGES = ("jax", "jaxlib", "numpy", "optax", "flax", "orbax-checkpoint", "grain")


class Directory:
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
        self.again = again or f"jtrain run {self.config}"

    def begin(self, config: Top) -> None:
        """Takes the directory for a run of these values.

        Raises:
            ConfigError: if it cannot be written.
        """
        if not self.first:
            return
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            text = dump(told(config), f"Every value of this run; to go on: {self.again}")
            rewrite(self.config, text.encode())
        except OSError as error:
            raise ConfigError(
                f"{self.path}: the run's directory cannot be written ({error.strerror}). Make "
                f"room, or run where you may write: it is runs/NAME below where you are."
            ) from None

    def refuse_another(self, config: Top, advice: str) -> list[str]:
        """What is otherwise than in the run that lies here, of what may; nothing if there is none.

        Args:
            advice: what to type where values differ that may not.

        Raises:
            ConfigError: if a value differs that may not, with each of them.
        """
        refuse_links(self.path)
        if not self.stands():  # nothing was ever trained here
            return []
        # By the schema at hand: the experiment need not lie above the place where the run does.
        stored = resolve(self.config, schema=type(config)).config
        changed = differences(told(stored), told(config))
        other = [d for d in changed if d.key.split(".")[0] not in MAY_DIFFER]
        if other:
            table = "\n".join(
                f"  {d.key}: {spell(d.before)} there, {spell(d.after)} here" for d in other
            )
            copy = "" if stored.name == config.name else f"a copy of {stored.name}, "
            raise ConfigError(f"{self.path} holds {copy}a run of other values:\n{table}\n{advice}")
        return [f"{d.key}: {spell(d.before)} -> {spell(d.after)}" for d in changed]

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

    def refuse_other_data(self, found: str, another: str) -> None:
        """Makes sure that a run goes on over the rows that it began with.

        Args:
            found: the fingerprint of what would be trained on; empty: it has none.
            another: what to type for a run of its own.

        Raises:
            DataError: if it is another, with both.
        """
        known = self.stands().get("data", "")
        if known and found and found != known:
            raise DataError(
                f"{self.path} was trained on\n  {known}\nand its data is now\n  {found}\n"
                f"so that its batches would be none of the run. Put the data back as it was. To "
                f"train on over the new data, start a run from the parameters of this one: "
                f"{another} init_from.path={self.path}"
            )

    def stands(self) -> dict[str, Any]:
        """What run.json says; empty before the first run."""
        try:
            return json.loads(self.status.read_text())
        except (FileNotFoundError, NotADirectoryError, json.JSONDecodeError):
            return {}

    @property
    def pace(self) -> float:
        """Seconds that a step takes, as the run counted its durations in time; 0 if it has none."""
        return self.stands().get("seconds_per_step", 0.0)

    def say(self, status: str, **facts: Any) -> None:
        """Writes that it is running, done, stopped, failed or crashed, and what is known of it."""
        if not self.first:
            return
        said = redacted_values({**self.stands(), "status": status, **facts})
        rewrite(self.status, json.dumps(said, indent=2).encode() + b"\n")


def environment(devices: list[Any]) -> Mapping[str, Any]:
    """What a result depends on beside the config: versions, devices, and the code's git state."""
    return {
        "jtrain": __version__,
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
