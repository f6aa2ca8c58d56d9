"""A study that trains in a moment, written where a test wants it: which blob is a point of?"""

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import jtrain as jt
from jtrain.checkpoint import CheckpointManager
from jtrain.config.resolve import resolve
from jtrain.core.pytree import named_leaves
from jtrain.core.state import TrainState
from jtrain.train.hooks.function_hooks import Observer
from jtrain.train.program import set_up
from jtrain.train.run_dir import RunDir
from jtrain.train.run_result import RunResult

CODE = '''\
import jax
import jax.numpy as jnp
import numpy as np

import jtrain as jt
from jtrain.data import Arrays, InOrder, Shuffled
from jtrain.data.batches.scan import check_labels
from jtrain.losses.cross_entropy import cross_entropy


@jt.configclass
class Data:
    """Points about the corners of a triangle."""

    rows: int = 200
    classes: int = 3


@jt.configclass
class Model:
    """One hidden layer."""

    width: int = 8
    drop: float = 0.25


def points(rows, seed):
    draw = np.random.default_rng(seed)
    label = draw.integers(3, size=rows).astype(np.int32)
    corner = np.float32([[0, 1], [1, -1], [-1, -1]])[label]
    return Arrays(x=corner + draw.normal(size=(rows, 2)).astype(np.float32), label=label)


@jt.configclass
class Config(jt.RunConfig):
    """Blobs."""

    data: Data = Data()
    model: Model = Model()

    def build(self, place):
        train, valid = points(self.data.rows, 0), points(50, 1)
        check_labels(train, self.data.classes)

        def init(key):
            up, down = jax.random.split(key)
            params = {
                "up": jax.random.normal(up, (2, self.model.width)),
                "bias": jnp.zeros(self.model.width),
                "down": jax.random.normal(down, (self.model.width, self.data.classes)) / 3,
            }
            return params, ()

        def loss(params, batch, rng):
            x = jnp.tanh(batch["x"] @ params["up"] + params["bias"][None])
            if rng is not None:
                keep = lambda key: jax.random.bernoulli(key, 1 - self.model.drop, x.shape[1:])
                x = jnp.where(jax.vmap(keep)(jt.row_keys(rng, batch)), x, 0)
            return cross_entropy(x @ params["down"], batch["label"], batch["mask"])

        return jt.Experiment(
            init=init,
            loss=loss,
            train=Shuffled(train, size=self.batch, seed=self.seed),
            valid=InOrder(valid, size=self.evaluate.batch or self.batch),
            optimizer=self.optimizer.build(self.steps),
        )
'''
# Each batch waits while there is a file `slow`.
SLOW = "import os\nimport time\n" + CODE.replace("    return Arrays(", "    return Slow(").replace(
    "\n\n@jt.configclass\nclass Data",
    """

class Slow(Arrays):
    def __getitem__(self, indices):
        time.sleep(0.04 if os.path.exists("slow") else 0)
        return super().__getitem__(indices)


@jt.configclass
class Data""",
)
YAML = """\
# Blobs: jtrain run configs/quick.yaml
experiment: quick
steps: 12
batch: 16
optimizer:
  kind: adamw
  lr: 3e-2
parallel:
  kind: single
evaluate:
  every: 6
checkpoint:
  every: 5
log:
  every: 1
"""


def write_study(directory: Path, code: str = CODE, config: str = YAML) -> Path:
    """A directory with experiments/quick.py and configs/quick.yaml; the path of the config."""
    (directory / "experiments").mkdir(parents=True)
    (directory / "experiments" / "quick.py").write_text(code)
    (directory / "configs").mkdir()
    path = directory / "configs" / "quick.yaml"
    path.write_text(config)
    return path


def rewrite(old: str, new: str) -> None:
    """Replaces some of the code of the study in the current directory."""
    path = Path("experiments/quick.py")
    code = path.read_text()
    assert code.count(old) == 1
    path.write_text(code.replace(old, new))


def at_home(directory: Path, monkeypatch: pytest.MonkeyPatch, compiled: Path) -> None:
    """Works in a directory as a person would; compiled programs are kept beside the tests."""
    monkeypatch.setenv("JAX_COMPILATION_CACHE_DIR", str(compiled))
    monkeypatch.chdir(directory)


def config_of(path: Path | str, settings: Sequence[str] = ()):
    """The values in a config file, with some changed."""
    return resolve(Path(path), settings).config


def run_quietly(config: jt.RunConfig, hooks: Sequence[Observer] = (), **more: Any) -> RunResult:
    """How a run ended; it says nothing on the screen."""
    with open(os.devnull, "w") as screen:
        return jt.run(config, hooks=hooks, screen=screen, **more)


def trained(path: Path | str, *settings: str, hooks: Sequence[Observer] = ()) -> RunResult:
    """How a run of a config ended."""
    return run_quietly(config_of(path, settings), hooks)


class At(jt.Hook):
    """Does something after a step."""

    def __init__(self, step: int, act):
        self.every, self._act = step, act

    def on_state(self, step, state):
        return self._act() if step == self.every else None


class PowerCutError(BaseException):
    """Ends a run where it stands: no error, which the run would tell of."""


def cut():
    raise PowerCutError


def state_of(directory: RunDir, step: int, config: Path | None = None) -> TrainState:
    """The state after a step, of a checkpoint of a run."""
    like = set_up(config_of(config or directory.config)).resolved.abstract_state
    with CheckpointManager(directory.checkpoints) as checkpoints:
        return checkpoints.restore(step, like)


def kept(outcome: RunResult, config: Path | None = None) -> dict[str, bytes]:
    """What a run has come to, bit for bit: its metrics and its last state."""
    leaves = named_leaves(state_of(outcome.directory, outcome.step, config))
    rows = {"metrics.jsonl": outcome.directory.metrics.read_bytes()}
    return rows | {name: np.asarray(leaf).tobytes() for name, leaf in leaves.items()}
