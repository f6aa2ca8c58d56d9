"""MLflow tracker, for a server or for files."""

import importlib
import os
import re
import time
from collections.abc import Mapping
from typing import Any, ClassVar, Literal

from jtrain.config.configclass import configclass
from jtrain.config.write_paths import TrackingUri
from jtrain.train.trackers.tracker import End, TrackedRun

_STATUS = {"done": "FINISHED", "stopped": "KILLED", "failed": "FAILED"}
_BATCH = 100  # parameters a call


@configclass
class MLflow:
    """A run of MLflow; `pip install 'jtrain[mlflow]'`."""

    kind: Literal["mlflow"] = "mlflow"
    uri: TrackingUri = ""
    """URI of the server, a directory (file:mlruns) or a database (sqlite:///mlflow.db); empty:
    MLFLOW_TRACKING_URI, or MLflow's default."""
    experiment: str = "jtrain"
    """MLflow experiment of the run."""

    package: ClassVar[str] = "mlflow"

    def open(self, about: TrackedRun) -> "_MLflowRun":
        """Start a run, or resume one."""
        tracking = importlib.import_module("mlflow.tracking")
        if self.uri.startswith("file:"):  # MLflow 3.17 refuses files without this
            os.environ.setdefault("MLFLOW_ALLOW_FILE_STORE", "true")
        client = tracking.MlflowClient(tracking_uri=self.uri or None)
        if about.id:
            client.update_run(about.id, status="RUNNING")
            return _MLflowRun(client, about.id)
        found = client.get_experiment_by_name(self.experiment)
        experiment = found.experiment_id if found else client.create_experiment(self.experiment)
        run = _MLflowRun(client, client.create_run(experiment, run_name=about.name).info.run_id)
        run.log_config(about.config)
        return run


class _MLflowRun:
    def __init__(self, client: Any, id: str):
        self.id, self._client = id, client

    def log_config(self, config: Mapping[str, Any]) -> None:
        entities = importlib.import_module("mlflow.entities")
        params = [entities.Param(_allowed(key), str(value)[:6000]) for key, value in config.items()]
        for i in range(0, len(params), _BATCH):
            self._client.log_batch(self.id, params=params[i : i + _BATCH])

    def write(self, step: int, numbers: Mapping[str, float]) -> None:
        entities = importlib.import_module("mlflow.entities")
        now = int(time.time() * 1000)
        metrics = [entities.Metric(_allowed(n), x, now, step) for n, x in numbers.items()]
        self._client.log_batch(self.id, metrics=metrics)

    def close(self, end: End) -> None:
        self._client.set_terminated(self.id, status=_STATUS[end])


def _allowed(name: str) -> str:
    """Return a name with the characters that MLflow rejects replaced."""
    return re.sub(r"[^\w\-. :/]", "_", name)
