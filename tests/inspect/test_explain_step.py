"""`jtrain explain`: FLOPs and saved arrays agree with JAX; why a step compiled again."""

import json
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest
from jax.ad_checkpoint import print_saved_residuals
from quick_study import config_of, write_study

from jtrain.cli import main
from jtrain.errors import ConfigError
from jtrain.inspect.explain.explain import Explanation, explain
from jtrain.inspect.explain.modules import select_modules
from jtrain.inspect.explain.operations import list_operations
from jtrain.inspect.explain.residuals import list_residuals
from jtrain.inspect.plan.collectives import collectives_of
from jtrain.inspect.plan.hlo import HloProgram
from jtrain.train.program import set_up

ROOT = Path(__file__).parents[2]
CONFIG = ROOT / "configs/shakespeare.yaml"
SMALL = [
    "batch=8",
    "data.context=16",
    "model.context=16",
    "model.layers=2",
    "model.width=32",
    "steps_per_call=1",
]
TOKENS = 8 * 16


def explained(*settings: str, compiles: bool = False) -> Explanation:
    return explain(set_up(config_of(CONFIG, [*SMALL, *settings])), compiles=compiles)[0]


@pytest.fixture(scope="module")
def plain() -> Explanation:
    return explained("parallel.kind=single")


@pytest.mark.thorough
def test_flops_of_a_linear_map_are_those_of_its_formula(plain):
    qkv = select_modules(plain.modules, "blocks/0/qkv")
    forward = 2 * 2 * TOKENS * 32 * 96  # two layers
    assert qkv.layers == 2
    assert qkv.flops == {"forward": forward, "backward": 2 * forward, "recomputed": 0}
    assert qkv.parameters == 2 * (32 * 96 + 96)


@pytest.mark.thorough
def test_modules_add_up_to_the_step(plain):
    assert plain.modules.total == plain.flops.hardware == plain.flops.model
    for node in plain.modules.walk():
        parts = [child.total for child in node.children.values()]
        assert not parts or node.total == pytest.approx(sum(parts))
    assert plain.modules.saved == plain.saved


@pytest.mark.thorough
def test_remat_computes_the_forward_pass_again_and_saves_less(plain):
    again = explained("parallel.kind=single", "model.remat=full")
    assert again.flops.model == plain.flops.model
    hardware, model = again.flops.hardware, again.flops.model
    assert hardware is not None
    assert model is not None
    assert again.recomputed == hardware - model > 0
    qkv = select_modules(again.modules, "qkv")
    assert qkv.flops["recomputed"] == qkv.flops["forward"]
    assert again.saved < plain.saved / 2


def test_residuals_are_those_that_jax_prints(capsys):
    def loss(w, x):
        h = jnp.tanh(x @ w["up"])
        return jnp.sum(jnp.sin(h @ w["down"]) ** 2)

    w = {"up": jnp.ones((4, 8)), "down": jnp.ones((8, 2))}
    x = jnp.ones((3, 4))
    print_saved_residuals(loss, w, x)
    printed = [line.partition(" ")[0] for line in capsys.readouterr().out.splitlines()]
    names = ["w/down", "w/up", "x"]
    forward = jax.make_jaxpr(lambda w, x: jax.vjp(lambda w, x: loss(w, x), w, x))(w, x)
    found = list_residuals(forward, names)
    shapes = sorted(each.array.replace("float32", "f32") for each in found)
    assert shapes == sorted(printed)
    assert {each.name for each in found if each.kind == "argument"} == {"w/down", "w/up", "x"}
    lines = {each.source.line for each in found if each.source}
    assert len(lines) > 1
    assert all(each.source.file == __file__ for each in found if each.source)


def test_a_loop_that_depends_on_the_data_is_named():
    def loss(w, x):
        return jax.lax.while_loop(lambda c: c.sum() < x, lambda c: c @ w, jnp.ones((2, 2))).sum()

    found = list_operations(jax.make_jaxpr(loss)(jnp.ones((2, 2)), 3.0))
    product = next(op for op in found if op.primitive == "dot_general")
    assert not product.counted
    assert product.flops == 16


def test_an_unknown_module_gets_the_nearest_name(plain):
    with pytest.raises(ConfigError, match=r"Did you mean --module 'blocks/\*/qkv'\?"):
        select_modules(plain.modules, "blocks/0/qvk")
    for name in ("blocks/*/qkv", "blocks/1/qkv", "blocks/qkv", "qkv"):
        assert select_modules(plain.modules, name).name == "blocks/*/qkv"
    with pytest.raises(ConfigError, match=r"Its modules: .*blocks/\*/qkv"):
        select_modules(plain.modules, "zzz")


@pytest.mark.thorough
def test_collectives_are_those_of_the_program():
    program = set_up(config_of(CONFIG, [*SMALL, "parallel={kind: fsdp, devices: 4, min_size: 0}"]))
    found, _, hlo = explain(program)
    compiled = found.compiled
    assert compiled is not None
    assert not compiled.unread
    sent = sum(
        c.sent for c in collectives_of(HloProgram(hlo), program.resolved.strategy.axes).collectives
    )
    assert sum(c.sent for c in compiled.collectives) == sent > 0
    assert any(c.module.startswith("blocks/*") for c in compiled.collectives)


@pytest.mark.thorough
def test_options_print_the_texts(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    path = str(write_study(tmp_path))
    assert main(["explain", path, "--jaxpr"]) == 0
    assert "dot_general" in capsys.readouterr().out
    assert main(["explain", path, "--hlo"]) == 0
    assert "ENTRY" in capsys.readouterr().out
    assert main(["explain", path, "--json", "--no-compile"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["flops"]["hardware"] == 3 * 2 * 16 * 8 * 3 + 2 * 2 * 16 * 2 * 8


@pytest.mark.thorough
def test_seven_billion_parameters_are_explained_in_less_than_a_minute(monkeypatch, capsys):
    monkeypatch.chdir(ROOT)
    began = time.process_time()  # of other programs on the machine nothing counts
    assert main(["explain", "configs/llama2_7b.yaml", "batch=16", "--json"]) == 0
    assert time.process_time() - began < 60
    shown = capsys.readouterr()
    assert "explained with model.attention=xla" in shown.err
    found = json.loads(shown.out)
    layers, width, hidden, vocab, time_steps, rows = 32, 4096, 11008, 32000, 2048, 16
    kernels = layers * (width * 3 * width + width * width + 3 * width * hidden)
    scores = 2 * 2 * rows * time_steps * time_steps * width * layers
    forward = 2 * rows * time_steps * (kernels + vocab * width) + scores
    assert found["flops"]["model"] == 3 * forward
    # Full remat saves the input of each layer, in bfloat16, and recomputes all but `down`.
    inputs = next(x for x in found["residuals"] if x["name"] == "input of a layer")
    assert inputs["bytes"] == layers * rows * time_steps * width * 2
    down = 2 * rows * time_steps * layers * width * hidden
    head = 2 * rows * time_steps * vocab * width
    assert found["flops"]["recomputed"] == forward - head - down
    assert found["modules"]["parameters"] == kernels + 2 * vocab * width + (2 * layers + 1) * width
    state = 12 * found["modules"]["parameters"]  # bytes: parameters and Adam's two moments
    share = found["compiled"]["memory"]["arguments"] * jax.device_count()  # split by fsdp
    assert state < share < 1.001 * state
