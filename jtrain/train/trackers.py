"""Trackers: services that take a run's numbers; a tracker is a value with `open(about)`."""

import abc
import dataclasses
import html
import importlib
import importlib.util
import os
import re
import struct
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, TypeAlias

from jtrain.config.configclass import TrackingUri, WrittenPath, configclass
from jtrain.config.registry import Kind, Registry
from jtrain.errors import ConfigError
from jtrain.io.regular_files import read_bytes

End: TypeAlias = Literal["done", "stopped", "failed"]
MAX_PICTURE_BYTES = 1 << 28
Media: TypeAlias = Mapping[str, Path | str]  # by name: a PNG file, or a text


@dataclasses.dataclass(frozen=True)
class TrackedRun:
    """The run that is tracked."""

    name: str
    directory: Path
    """Directory of the run, where a tracker may keep its files."""
    config: Mapping[str, Any]
    """Values by dotted key."""
    id: str = ""
    """Id of the service's run to resume; empty for a new one."""
    run: str = ""
    """Id that jtrain gave the run; a copy of the run has another."""


@dataclasses.dataclass(frozen=True)
class TrackerRun:
    """Run in a service. Its functions are called in one thread; they may raise, and take long."""

    id: str
    """Id of the run in the service."""
    write: Callable[[int, dict[str, float]], None]
    """Adds numbers of a step: `loss`, `valid/loss`, ... Steps never decrease."""
    close: Callable[[End], None]
    """Reports how the run ended, and sends the remaining rows."""
    show: Callable[[int, Media], None] | None = None
    """Adds the pictures and texts of a step; None: the service takes none."""
    attach: Callable[[Path], None] | None = None
    """Adds a file at the end, the report of the run; None: the service takes none."""


@configclass
class TrackerConfig(Kind, abc.ABC):
    """Tracker. `open` imports its package, and may raise and take long."""

    package: ClassVar[str] = ""
    """The package to be installed, if there is one."""

    @abc.abstractmethod
    def open(self, about: TrackedRun) -> TrackerRun:
        """Open a new run in the service, or the one with the id `about.id`."""


def check_installed(trackers: Sequence[TrackerConfig]) -> None:
    """Raise unless the packages of the trackers are installed; imports none.

    Raises:
        ConfigError: with the command that installs the missing package.
    """
    for tracker in trackers:
        package = tracker.package
        if package and importlib.util.find_spec(package) is None:
            extra = f"'jtrain[{tracker.kind}]'" if isinstance(tracker, _SHIPPED) else package
            raise ConfigError(
                f"trackers: {tracker.kind} needs the package {package}, which is not installed. "
                f"Type: pip install {extra}, or run without it: trackers=[]"
            )


@configclass
class TensorBoard(TrackerConfig):
    """Event files that `tensorboard --logdir runs` shows; `pip install 'jtrain[tensorboard]'`."""

    kind: Literal["tensorboard"] = "tensorboard"
    directory: WrittenPath = ""
    """Directory of the event files, in a folder named after the run; empty:
    runs/NAME/tensorboard."""

    package: ClassVar[str] = "tensorboardX"

    def open(self, about: TrackedRun) -> TrackerRun:
        """Start a file beside existing ones, which a new run hides."""
        package = importlib.import_module(self.package)
        proto = importlib.import_module(f"{self.package}.proto.summary_pb2")
        folder = about.directory / "tensorboard"
        if self.directory:
            folder = Path(self.directory) / about.name
        old = len(list(folder.glob("events.out.tfevents.*")))
        writer = package.SummaryWriter(
            str(folder),
            # A session that starts at step 0 hides everything that was written before it.
            purge_step=0 if old and not about.id else None,
            filename_suffix=f".{old}",  # files of the same second would overwrite each other
        )
        if not about.id:
            table = "\n".join(f"    {key}: {value}" for key, value in about.config.items())
            writer.add_text("config", table, 0)
            plain = {
                key: value if isinstance(value, bool | int | float) else str(value)
                for key, value in about.config.items()
            }
            # `add_hparams` would start a run of its own.
            summary = importlib.import_module(f"{self.package}.summary")
            for each in summary.hparams(plain, dict.fromkeys(("loss", "valid/loss"), 0.0)):
                writer.file_writer.add_summary(each)

        def write(step: int, numbers: Mapping[str, float]) -> None:
            for name, value in numbers.items():
                writer.add_scalar(name, value, step)
            writer.flush()

        def show(step: int, shown: Media) -> None:
            for name, value in shown.items():
                if isinstance(value, str):
                    writer.add_text(name, f"```\n{value}\n```", step)
                    continue
                png = read_bytes(value, most=MAX_PICTURE_BYTES)  # `add_image` needs pillow
                width, height = struct.unpack(">II", png[16:24])
                image = proto.Summary.Image(width=width, height=height, encoded_image_string=png)
                value = proto.Summary.Value(tag=name, image=image)
                writer.file_writer.add_summary(proto.Summary(value=[value]), step)
            writer.flush()

        return TrackerRun("events", write, lambda end: writer.close(), show)


@configclass
class MLflow(TrackerConfig):
    """A run of MLflow; `pip install 'jtrain[mlflow]'`."""

    kind: Literal["mlflow"] = "mlflow"
    uri: TrackingUri = ""
    """URI of the server, a directory (file:mlruns) or a database (sqlite:///mlflow.db); empty:
    MLFLOW_TRACKING_URI, or MLflow's default."""
    experiment: str = "jtrain"
    """MLflow experiment of the run."""

    package: ClassVar[str] = "mlflow"

    def open(self, about: TrackedRun) -> TrackerRun:
        """Start a run, or resume one."""
        tracking, entities = map(importlib.import_module, ("mlflow.tracking", "mlflow.entities"))
        if self.uri.startswith("file:"):  # MLflow 3.17 refuses files without this
            os.environ.setdefault("MLFLOW_ALLOW_FILE_STORE", "true")
        client = tracking.MlflowClient(tracking_uri=self.uri or None)
        id = about.id or self._create_run(client, entities, about)
        client.update_run(id, status="RUNNING")

        def write(step: int, numbers: Mapping[str, float]) -> None:
            now = int(time.time() * 1000)
            metrics = [entities.Metric(_allowed(n), x, now, step) for n, x in numbers.items()]
            client.log_batch(id, metrics=metrics)

        def show(step: int, shown: Media) -> None:
            for name, value in shown.items():
                if isinstance(value, str):
                    client.log_text(id, value, f"texts/{_allowed(name)}-{step}.txt")
                else:
                    client.log_artifact(id, str(value), "pictures")

        status = {"done": "FINISHED", "stopped": "KILLED", "failed": "FAILED"}
        close = lambda end: client.set_terminated(id, status=status[end])
        attach = lambda path: client.log_artifact(id, str(path))
        return TrackerRun(id, write, close, show, attach)

    def _create_run(self, client: Any, entities: Any, about: TrackedRun) -> str:
        found = client.get_experiment_by_name(self.experiment)
        experiment = found.experiment_id if found else client.create_experiment(self.experiment)
        id = client.create_run(experiment, run_name=about.name).info.run_id
        # MLflow takes values of 6000 characters, and 100 of them a call.
        params = [entities.Param(_allowed(k), str(x)[:6000]) for k, x in about.config.items()]
        for i in range(0, len(params), 100):
            client.log_batch(id, params=params[i : i + 100])
        return id


def _allowed(name: str) -> str:
    return re.sub(r"[^\w\-. :/]", "_", name)


@configclass
class WandB(TrackerConfig):
    """A run at wandb.ai, or at your own server; `pip install 'jtrain[wandb]'`."""

    kind: Literal["wandb"] = "wandb"
    project: str = "jtrain"
    """W&B project of the run."""
    entity: str = ""
    """User or team of the project; empty: the user who is logged in."""
    mode: Literal["online", "offline"] = "online"
    """`offline` writes runs/NAME/wandb, which `wandb sync` sends later."""

    package: ClassVar[str] = "wandb"

    def open(self, about: TrackedRun) -> TrackerRun:
        """Start a run, or resume one.

        Raises:
            ConfigError: if the mode is online and nobody is logged in.
        """
        wandb = importlib.import_module("wandb")
        if self.mode == "online" and not wandb.api.api_key:  # wandb would prompt and wait
            raise ConfigError(
                "nobody is logged in to wandb. Type: wandb login, or write files that are synced "
                "later: trackers=[{kind: wandb, mode: offline}]"
            )
        run = wandb.init(
            project=self.project,
            entity=self.entity or None,
            mode=self.mode,
            name=about.name,
            id=about.id or None,
            resume="allow" if about.id else None,
            dir=str(about.directory),
            config=dict(about.config),
            settings=wandb.Settings(console="off", silent=True),
            reinit="create_new",
        )
        write = lambda step, numbers: run.log(dict(numbers), step=step)

        def show(step: int, shown: Media) -> None:
            text = lambda x: wandb.Html(f"<pre>{html.escape(x)}</pre>")
            media = {
                n: text(x) if isinstance(x, str) else wandb.Image(str(x)) for n, x in shown.items()
            }
            run.log(media, step=step)

        close = lambda end: run.finish(exit_code=int(end == "failed"))
        attach = lambda path: run.save(str(path), base_path=str(path.parent), policy="now")
        return TrackerRun(run.id, write, close, show, attach)


_SHIPPED = (TensorBoard, WandB, MLflow)
Tracker: TypeAlias = Annotated[
    TensorBoard | WandB | MLflow, Registry("trackers", TrackerConfig, "open")
]
