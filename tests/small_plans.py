"""A small transformer for plans on virtual CPU devices, which compiles in seconds."""

from pathlib import Path

from jtrain.config.resolve import resolve
from jtrain.train.experiment import RunConfig

CONFIG = Path(__file__).parent.parent / "configs" / "shakespeare.yaml"
SMALL = (
    *("batch=16", "data.context=16", "model.context=16", "model.layers=1", "model.width=32"),
    *("model.heads=2", "steps_per_call=1"),
)


def small(*words: str) -> RunConfig:
    """Return the config with these settings."""
    return resolve(CONFIG, [*SMALL, *words]).config  # type: ignore[return-value]
