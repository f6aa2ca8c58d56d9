"""FLOPs of a plan: those of the loss, or a lower bound with a warning."""

import json

import pytest
from quick_study import CODE, write_study
from small_plans import small

from jtrain.cli import main
from jtrain.inspect.plan.plan import make_plan
from jtrain.inspect.plan.topology import find_topology

# Halves the points until they are small: how often depends on the data.
LOOP = """            turn = jnp.float32([[0.0, 0.5], [-0.5, 0.0]])
            small = jax.lax.while_loop(
                lambda x: jnp.abs(x).max() > 0.1, lambda x: x @ turn, batch["x"]
            )
            x = jnp.tanh((batch["x"] + small) @ params["up"] + params["bias"][None])
"""
LINE = """            x = jnp.tanh(batch["x"] @ params["up"] + params["bias"][None])
"""


def test_a_loop_that_depends_on_data_gives_a_lower_bound_with_a_warning(
    tmp_path, monkeypatch, capsys
):
    assert LINE in CODE
    path = write_study(tmp_path, CODE.replace(LINE, LOOP))
    monkeypatch.chdir(tmp_path)
    words = ["plan", str(path), "--topology", "cpu:8"]
    assert main([*words, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert not found["flops_exact"]
    first, second, turn = 2 * 16 * 2 * 8, 2 * 16 * 8 * 3, 2 * 16 * 2 * 2
    assert found["model_flops"] == 2 * first + 3 * second + turn
    assert main(words) == 0
    shown = capsys.readouterr().out
    assert "at least" in shown
    assert "warning: the loss has loops whose number of turns depends on data" in shown


@pytest.mark.thorough
def test_flops_of_a_plan_are_those_of_its_program():
    plan = make_plan(small("parallel.kind=fsdp", "parallel.min_size=0"), find_topology("cpu:8"))
    assert plan.flops_exact
    assert plan.estimate is not None
    # The compiled products, all of them on one device, and the optimizer's none.
    assert plan.estimate.flops * 8 == pytest.approx(plan.flops.hardware, rel=0.05)
