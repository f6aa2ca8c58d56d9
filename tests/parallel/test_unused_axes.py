"""An axis that no dim can use is refused before anything is compiled, with what to type."""

import sys
from pathlib import Path

import jax.numpy as jnp
import pytest
from quick_study import config_of, write_study

from jtrain.errors import ShardingError
from jtrain.parallel import Axes
from jtrain.train.program import set_up

CONFIGS = Path(__file__).parents[2] / "configs"
LANGUAGE = [
    "batch=16",
    "data.context=32",
    "model.context=32",
    "model.layers=2",
    "model.heads=4",
    "model.width=64",
]
CASES = [
    ("quick.yaml", "tensor", "no dim is named heads or kv_heads or hidden or vocab"),
    ("quick.yaml", "context", "no dim is named time"),
    *(
        pytest.param("shakespeare.yaml", axis, why, marks=pytest.mark.thorough)
        for axis, why in {
            "stage": r"no dim is named layers.*model\.scan=true",
            "expert": r"no dim is named experts.*model\.experts",
        }.items()
    ),
]


def told(file: str, home: Path, parallel: str):
    """Make the config of a small language model, or of a study that names no dims."""
    sharded = f"parallel={{kind: sharded, {parallel}}}"
    if file == "quick.yaml":
        return config_of(home / "configs/quick.yaml", [sharded])
    return config_of(CONFIGS / file, [*LANGUAGE, sharded])


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(sys, "path", list(sys.path))
    write_study(tmp_path)
    return tmp_path


@pytest.mark.thorough
@pytest.mark.parametrize(("file", "axis", "why"), CASES)
def test_an_axis_without_a_dim_is_refused(home, file, axis, why):
    parts = set_up(told(file, home, f"{axis}: 2"))
    with pytest.raises(ShardingError, match=rf"parallel\.{axis}=2, and no dim.*{why}") as error:
        parts.lower_step()
    assert f"Take parallel.{axis}=1 " in str(error.value)
    assert "parallel.fsdp=0" in str(error.value)
    set_up(told(file, home, f"{axis}: 1, fsdp: 0")).lower_step()


def test_dims_that_do_not_divide_are_named():
    strategy = Axes(tensor=2).build()
    strategy.placement.constrain(jnp.zeros((8, 5)), "batch", "hidden")
    with pytest.raises(ShardingError, match=r"no dim can .*: hidden 5 is no multiple of tensor 2"):
        strategy.check_axes_used({"params": {"up": jnp.zeros((4, 5))}}, {"up": (None, "hidden")})
    strategy.placement.constrain(jnp.zeros((8, 6)), "batch", "hidden")
    strategy.check_axes_used({"params": {"up": jnp.zeros((4, 5))}}, {"up": (None, "hidden")})
