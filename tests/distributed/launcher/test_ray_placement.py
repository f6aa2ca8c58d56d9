"""Ray as an engine, without Ray: resources, room, order, addresses and messages."""

import importlib.util
import signal
import time

import pytest

from jtrain.cli import main
from jtrain.distributed.heartbeat import Heartbeat
from jtrain.distributed.launcher.ray import cluster, gang
from jtrain.distributed.launcher.ray.cluster import connection_error, parse_address
from jtrain.distributed.launcher.ray.gang import RayWorker
from jtrain.distributed.launcher.ray.launch import forwarded
from jtrain.distributed.launcher.ray.node_worker import Report
from jtrain.distributed.launcher.ray.placement import (
    Host,
    Node,
    default_resources,
    describe_nodes,
    order,
    parse_resources,
    room,
)
from jtrain.errors import FAULT, UserError

NODES = [Node("10.0.0.1", {"CPU": 8.0, "GPU": 4.0}), Node("10.0.0.2", {"CPU": 8.0, "GPU": 3.0})]
RUN = ["run", "configs/quick.yaml"]


def test_resources_are_parsed():
    assert parse_resources("CPU=4,GPU=0.5") == {"CPU": 4.0, "GPU": 0.5}
    assert parse_resources("") == {}


@pytest.mark.parametrize("text", ["GPU", "GPU=0", "GPU=-1", "=3", "GPU=x", "GPU=inf"])
def test_a_resource_without_a_number_is_refused_with_one_to_type(text: str):
    with pytest.raises(UserError, match="type --resources CPU=4,GPU=1"):
        parse_resources(text)
    parse_resources("CPU=4,GPU=1")


def test_a_resource_that_ray_spells_otherwise_is_refused_with_its_name():
    with pytest.raises(UserError, match="Ray writes gpu as GPU; type --resources GPU=2"):
        parse_resources("gpu=2")
    parse_resources("GPU=2")


def test_room_is_counted_node_by_node():
    assert room(NODES, {"CPU": 1.0, "GPU": 2.0}) == 3, "2 and 1: no process spans two nodes"
    assert room(NODES, {"CPU": 3.0}) == 4
    assert room(NODES, {"TPU": 4.0}) == 0
    assert room(NODES, {"CPU": 0.1}) == 160, "no rounding below"
    assert room([], {"CPU": 1.0}) == 0


def test_a_process_gets_a_gpu_or_all_chips_of_a_host_where_there_are_any():
    hosts = [Node("10.0.0.1", {"CPU": 96.0, "TPU": 4.0}), Node("10.0.0.2", {"CPU": 8.0})]
    assert default_resources(NODES, on_cpu=False) == {"CPU": 1.0, "GPU": 1.0}
    assert default_resources(hosts, on_cpu=False) == {"CPU": 1.0, "TPU": 4.0}
    assert default_resources(NODES, on_cpu=True) == {"CPU": 1.0}
    assert default_resources([Node("10.0.0.1", {"CPU": 2.0})], on_cpu=False) == {"CPU": 1.0}


def test_the_nodes_of_a_message_have_what_is_needed():
    assert describe_nodes(NODES, {"GPU": 1.0}) == "10.0.0.1 with GPU=4; 10.0.0.2 with GPU=3"
    assert describe_nodes([], {"GPU": 1.0}) == "no node"
    assert describe_nodes(NODES * 5, {"GPU": 1.0}).endswith("; ...")


def test_processes_of_a_node_are_neighbours_and_a_slice_keeps_its_order():
    at = lambda node, worker=0: Host(node, f"10.0.0.{node}", "slice" if worker else "", worker)
    assert order([at("b"), at("a"), at("b"), at("a")]) == [0, 2, 1, 3]
    assert order([at("a", 3), at("b", 1), at("c", 2)]) == [1, 2, 0]


def test_addresses_are_recognised():
    assert parse_address("", "") == "local"
    assert parse_address("", "10.0.0.1:6379") == "10.0.0.1:6379"
    assert parse_address("auto", "10.0.0.1:6379") == "auto", "what is typed counts"
    assert parse_address("head:6379", "") == "head:6379"


@pytest.mark.parametrize(
    ("typed", "variable", "says"),
    [
        ("10.0.0.1", "", "--address '10.0.0.1' is not an address"),
        ("", "nonsense", "RAY_ADDRESS= 'nonsense' is not an address"),
        ("ray://10.0.0.1:10001", "", "is for Ray Client"),
    ],
)
def test_another_address_is_refused_with_the_forms(typed: str, variable: str, says: str):
    with pytest.raises(UserError, match="Type --address HOST:6379 ") as error:
        parse_address(typed, variable)
    assert says in str(error.value)


def test_variables_of_the_driver_are_forwarded_by_name():
    environ = {"JAX_PLATFORMS": "cpu", "HOME": "/home/me", "DATA": "/data", "WANDB_MODE": "offline"}
    assert forwarded(environ) == {"JAX_PLATFORMS": "cpu", "WANDB_MODE": "offline"}
    assert forwarded(environ, "DATA, JAX_PLATFORMS") == forwarded(environ) | {"DATA": "/data"}
    with pytest.raises(UserError, match=r"--env names TOKEN, which is not set here\. Type export"):
        forwarded(environ, "TOKEN")


VERSIONS = """Version mismatch: The cluster was started with:
    Ray: 2.55.1
    Python: 3.12.4
This process on node 10.0.0.2 was started with:
    Ray: 2.60.0
    Python: 3.11.7
"""


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (VERSIONS, "Type: pip install 'ray==2.55.1', in an environment of Python 3.12.4"),
        (VERSIONS, "this environment has Ray 2.60.0 and Python 3.11.7"),
        ("RPC error: InvalidAuthToken: missing", "Copy ~/.ray/auth_token of its head node"),
        ("Could not find any running Ray instance. x", "Start one by ray start --head"),
    ],
)
def test_what_ray_says_of_a_connection_becomes_what_to_type(text: str, says: str):
    assert says in str(connection_error("10.0.0.1:6379", text))


def test_nobody_at_an_address_is_noticed_before_ray_waits(capsys, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(cluster, "check_installed", lambda: None)
    monkeypatch.setattr("jtrain.distributed.launcher.ray.launch.check_installed", lambda: None)
    began = time.monotonic()
    assert main(["launch", "--engine", "ray", "--address", "127.0.0.1:1", *RUN]) == FAULT
    assert time.monotonic() - began < 10
    said = capsys.readouterr().err
    assert "no Ray cluster answers at 127.0.0.1:1 (Connection refused)" in said
    assert "Start one by ray start --head --port=6379" in said


def test_without_ray_the_command_that_installs_it_is_named(capsys, monkeypatch: pytest.MonkeyPatch):
    find = importlib.util.find_spec
    absent = lambda name, *more: None if name == "ray" else find(name, *more)
    monkeypatch.setattr(importlib.util, "find_spec", absent)
    assert main(["launch", "--engine", "ray", *RUN]) == 2
    assert "Type: pip install 'jtrain[ray]'" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (
            ["--engine", "rai"],
            "no engine rai; the engines are local, ray, k8s, trainjob, skypilot; did you mean ray?",
        ),
        (
            ["--engine", "docker"],
            "no engine docker; the engines are local, ray, k8s, trainjob, skypilot.",
        ),
        (["--address", "auto"], "local takes no --address; leave it out, or type --engine ray"),
        (["--resources", "GPU=1"], "local takes no --resources"),
        (["--wait", "5"], "local takes no --wait"),
        (["--env", "HOME"], "local takes no --env"),
        (["--processes", "2:4"], "found --processes 2:4; type --processes 4, or --engine ray"),
        (["--processes", "4:2"], "invalid number '4:2': type 2, or 2:4"),
        (["--processes", "many"], "invalid number 'many': type 2"),
        (["--processes", "0"], "--processes is at least 1; type --processes 2"),
        (["--engine", "ray", "--wait", "-1"], "--wait is at least 0"),
    ],
)
def test_an_engine_is_told_what_it_does_not_take(words: list[str], says: str, capsys):
    assert main(["launch", *words, *RUN]) == 2
    assert says in capsys.readouterr().err


def report(now: float, **facts) -> Report:
    beat = Heartbeat().now()._replace(failed=facts.pop("failed", 0.0))
    known = {
        "code": None,
        "ended": 0.0,
        "stopped": False,
        "stacks": b"",
        "output": (),
    }
    return Report(now=now, beat=beat, **{**known, **facts})


def test_times_of_a_node_become_times_of_the_driver():
    """The clocks of two machines differ; the report with the shortest way tells by how much."""
    worker = RayWorker(1, None, Host("a", "10.0.0.1", "", 0))
    worker.update(report(100.0), 1000.5)
    worker.update(report(101.0, faults=(100.5,)), 1001.2)
    assert worker.beat().failed == 0.0
    worker.update(report(102.0, code=70, ended=101.5, failed=101.0, output=((True, "x\n"),)), 1003)
    assert (worker.code, worker.exit_reason) == (70, "exit code 70")
    assert worker.ended == pytest.approx(1001.7)
    assert worker.beat().failed == pytest.approx(1001.2)
    assert worker.hidden_output == "x\n"


def test_a_lost_actor_counts_as_a_kill_and_is_named():
    worker = RayWorker(1, None, Host("a", "10.0.0.1", "", 0))
    assert worker.code is None
    worker.lose()
    assert worker.code == -signal.SIGKILL
    assert worker.exit_code == 137
    assert worker.failure_output() == (
        "process 1 failed (its Ray actor on 10.0.0.1 died), and all were ended\n"
    )


def test_more_processes_than_fit_are_refused_with_what_there_is():
    message = gang.no_room(8, {"GPU": 1.0}, 7, describe_nodes(NODES, {"GPU": 1.0}), "--processes 7")
    assert "8 processes of GPU=1 each do not fit on the Ray cluster, which holds 7" in message
    assert "10.0.0.1 with GPU=4" in message
    assert "Type --processes 7" in message
