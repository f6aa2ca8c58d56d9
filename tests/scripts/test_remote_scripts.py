"""scripts/tpu_vm.sh and gpu_machine.sh, against a cloud in a folder (cloud.py)."""

import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from cloud import ROOT, Cloud
from quick_study import write_study

from jtrain.distributed.manifests.machines import TPUS
from jtrain.train.hooks.metrics import read_metrics

RUN = ("run", "configs/gpt2.yaml", "name=a b")
SLICE = ("slice", "--zone", "europe-west4-b", "--type", "v5litepod-16", "--nfs", "10.0.0.2:/share")
# The first life is at work for a minute, unless it is asked to end.
WAITS = """#!/bin/bash
trap 'echo saved >> "$CLOUD/started"; exit 75' TERM
echo one >> "$CLOUD/started"
[ "$(wc -l < "$CLOUD/started")" = 1 ] || exit 0
for _ in $(seq 600); do sleep 0.1; done
"""
LONGER = ("steps=100", "log.every=10", "evaluate.every=0")
QUICK = ("--wait", "0")


def test_a_slice_is_made_used_and_deleted(tmp_path):
    cloud = Cloud(tmp_path, 0, 0, hosts=2)
    done = cloud.run("tpu_vm.sh", *SLICE, *QUICK, "--spot", *RUN)
    assert done.returncode == 0, done.stderr
    create = next(call for call in cloud.calls if "create" in call)
    assert create[1:] == [
        "compute", "tpus", "queued-resources", "create", "slice", "--node-id=slice",
        "--accelerator-type=v5litepod-16", "--runtime-version=v2-alpha-tpuv5-lite", "--spot",
        "--zone=europe-west4-b",
    ]  # fmt: skip
    assert cloud.started == ["run configs/gpt2.yaml name=a b"] * 2  # on each host
    assert cloud.names()[-1] == "delete"
    assert not (cloud.folder / "state").exists()
    installed = (cloud.folder / "installed").read_text()
    assert "venv --python 3.12" in installed
    assert "jtrain[tpu]" in installed
    # Both hosts wrote into the file system that they share, and it is here now.
    assert (cloud.project / "runs/gpt2/metrics.jsonl").read_text() == "one\n" * 2


def test_a_preempted_slice_is_replaced_and_the_run_resumed(tmp_path):
    cloud = Cloud(tmp_path, 255, 0)
    done = cloud.run("tpu_vm.sh", *SLICE, *QUICK, *RUN)
    assert done.returncode == 0, done.stderr
    assert cloud.names().count("create") == 2
    assert [name for name in cloud.names() if name in {"create", "delete"}] == [
        "create", "delete", "create", "delete",
    ]  # fmt: skip
    assert len(cloud.started) == 2
    assert "slice slice: SUSPENDED" in done.stderr
    assert (cloud.project / "runs/gpt2/metrics.jsonl").read_text() == "one\n" * 2


def test_a_run_is_resumed_on_the_same_slice_after_each_other_code(tmp_path):
    codes = [70, 75, 124, 134, 137, 143]
    cloud = Cloud(tmp_path, *codes, 0)
    done = cloud.run("tpu_vm.sh", *SLICE, *QUICK, *RUN)
    assert (done.returncode, len(cloud.started)) == (0, 7), done.stderr
    assert re.findall(r"exit code (\d+)\): resuming", done.stderr) == [str(code) for code in codes]
    assert cloud.names().count("create") == 1
    assert (cloud.folder / "installed").read_text().count("jtrain[tpu]") == 1


def test_an_error_in_the_command_is_not_repeated(tmp_path):
    cloud = Cloud(tmp_path, 2, 0)
    done = cloud.run("tpu_vm.sh", *SLICE, *QUICK, *RUN)
    assert (done.returncode, len(cloud.started), cloud.names()[-1]) == (2, 1, "delete")
    assert "repeating would not change" in done.stderr


@pytest.mark.thorough
def test_restarts_come_to_an_end(tmp_path):
    cloud = Cloud(tmp_path, 70, 75, 124)
    done = cloud.run("tpu_vm.sh", *SLICE, *QUICK, "--restarts", "2", *RUN)
    assert (done.returncode, len(cloud.started), cloud.names()[-1]) == (124, 3, "delete")
    assert "no restart is left: --restarts allows more" in done.stderr


@pytest.mark.thorough
def test_a_slice_with_results_that_cannot_be_fetched_stays(tmp_path):
    cloud = Cloud(tmp_path, 0, program="#!/bin/sh\nrm -rf runs\necho no folder > runs\n")
    done = cloud.run("tpu_vm.sh", *SLICE, *QUICK, *RUN)
    assert done.returncode == 1, done.stderr
    assert "delete" not in cloud.names()
    line = re.search(r"to delete it: (gcloud .*)", done.stderr)
    assert line
    subprocess.run(["bash", "-c", line[1]], env=cloud.environ, check=True, timeout=30)
    assert not (cloud.folder / "state").exists()


@pytest.mark.thorough
def test_a_slice_is_kept_if_asked(tmp_path):
    cloud = Cloud(tmp_path, 0)
    assert cloud.run("tpu_vm.sh", *SLICE, *QUICK, "--keep", *RUN).returncode == 0
    assert "delete" not in cloud.names()


def test_a_dry_run_prints_each_command_and_calls_nothing(tmp_path):
    cloud = Cloud(tmp_path)
    done = cloud.run("tpu_vm.sh", *SLICE, "--spot", "--dry-run", *RUN)
    assert (done.returncode, cloud.calls) == (0, [])
    verbs = re.findall(r"^\+ gcloud compute tpus \S+ (\w+)", done.stderr, re.MULTILINE)
    assert verbs == [
        "create",
        "scp",
        "ssh",
        "ssh",
        "ssh",
        "ssh",
        "scp",
        "delete",
        "delete",
        "create",
    ]
    assert list(cloud.project.iterdir()) == [cloud.project / "configs"]


@pytest.mark.parametrize("kind", sorted(TPUS.keys() - {"tpu7x"}))
def test_types_have_the_runtime_of_the_manifests(kind, tmp_path):
    tpu = TPUS[kind]
    words = ("x", "--zone", "z", "--type", f"{tpu.vm}-8", "--dry-run", "run", "c.yaml")
    done = Cloud(tmp_path).run("tpu_vm.sh", *words)
    assert f"--runtime-version={tpu.runtime} " in done.stderr


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ([], "the name of the slice is missing"),
        (["x"], "the command is missing: write run CONFIG"),
        (["x", "run", "c.yaml"], "the zone is missing: --zone europe-west4-b"),
        (["x", "--zone", "z", "run", "c.yaml"], "the type of the slice is missing: --type v5lite"),
        (["x", "--zone", "z", "--type", "tpu7x-8", "run", "c"], "only GKE has it: jtrain launch"),
        (["x", "--zone", "z", "--type", "v9-8", "run", "c"], "no type v9-8 is known: v4-8"),
        (["x", "--zone", "z", "--type", "v6e-big", "run", "c"], "does not end with a number"),
        (["x", "--zone", "z", "--type", "v6e-16", "run", "c"], "share runs/: write --nfs HOST"),
        (["x", "--zone", "z", "--type", "v6e-8", "--nfs", "a", "run", "c"], "is not HOST:/PATH"),
        (["x", "--zone", "z", "--type", "v6e-8", "--spot", "run", "c"], "add checkpoint.store=gs://"),
        (["x", "--zone", "z", "--type", "v6e-8", "--restarts", "a", "run", "c"], "are numbers"),
        (["x", "--zon", "z", "run", "c"], "no option --zon; --help lists"),
        (["x", "--zone"], "--zone needs a value"),
        (["x", "eval", "c"], "the command of jtrain begins with run"),
    ],
)  # fmt: skip
def test_what_is_missing_is_said_before_anything_is_asked_for(words, said, tmp_path):
    cloud = Cloud(tmp_path)
    done = cloud.run("tpu_vm.sh", *words)
    assert (done.returncode, cloud.calls) == (2, [])
    assert said in done.stderr


def test_a_spot_host_with_a_store_needs_no_shared_folder(tmp_path):
    words = ("x", "--zone", "z", "--type", "v6e-8", "--spot", "--dry-run", *RUN)
    done = Cloud(tmp_path).run("tpu_vm.sh", *words, "checkpoint.store=gs://bucket/runs")
    assert done.returncode == 0, done.stderr
    assert "mount" not in done.stderr


def test_a_run_on_a_gpu_machine_is_resumed_and_fetched(tmp_path):
    cloud = Cloud(tmp_path, 255, 124, 0)  # 255: ssh lost the connection
    done = cloud.run("gpu_machine.sh", "me@host", *QUICK, *RUN)
    assert (done.returncode, len(cloud.started)) == (0, 3), done.stderr
    assert {call[0] for call in cloud.calls} == {"ssh", "scp"}
    assert "jtrain[cuda13]" in (cloud.folder / "installed").read_text()  # the driver is 580
    assert (cloud.project / "runs/gpt2/metrics.jsonl").read_text() == "one\n" * 3


@pytest.mark.thorough
def test_a_real_run_goes_on_where_it_was_stopped(tmp_path):
    """jtrain itself, which a SIGTERM stops early in its first life."""
    program = f"""#!/bin/bash
{sys.executable} -m jtrain "$@" &
if [ ! -e "$CLOUD/lived" ]; then
  touch "$CLOUD/lived"
  until grep -qs "step  20" runs/quick/log.txt; do sleep 0.05; done
  kill -TERM $!
fi
wait $!
"""
    cloud = Cloud(tmp_path, program=program)
    shutil.rmtree(cloud.project)
    cloud.project.mkdir()
    write_study(cloud.project)
    done = cloud.run("gpu_machine.sh", "host", *QUICK, "run", "configs/quick.yaml", *LONGER)
    assert done.returncode == 0, done.stderr
    assert "stopped by a signal, and saved (exit code 75): resuming" in done.stderr
    log = (cloud.project / "runs/quick/log.txt").read_text()
    resumed = re.search(r"resumes from step (\d+) of 100", log)
    assert resumed, log
    assert 20 <= int(resumed[1]) < 100
    steps = [
        row["step"]
        for row in read_metrics(cloud.project / "runs/quick/metrics.jsonl")
        if "loss" in row
    ]
    assert sorted(set(steps)) == list(range(10, 101, 10))


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ([], "the machine is missing"),
        (["host"], "the command is missing"),
        (["host", "--wait", "x", "run", "c"], "are numbers"),
        (["host", "eval", "c"], "begins with run"),
    ],
)
def test_what_is_missing_for_a_gpu_machine_is_said(words, said, tmp_path):
    done = Cloud(tmp_path).run("gpu_machine.sh", *words)
    assert done.returncode == 2
    assert said in done.stderr


@pytest.mark.thorough
def test_a_run_that_a_lost_connection_left_at_work_is_ended_before_the_next(tmp_path):
    """It would hold the accelerator, and the lock of the run."""
    cloud = Cloud(tmp_path, program=WAITS)
    words = ["bash", str(ROOT / "scripts" / "gpu_machine.sh"), "host", *QUICK, *RUN]
    first = subprocess.Popen(
        words, env=cloud.environ, cwd=cloud.project, stderr=subprocess.DEVNULL, process_group=0
    )
    _until(lambda: (cloud.folder / "started").exists())
    # As the network does it: all that is here ends, and what runs there does not notice.
    pid = int((cloud.folder / "host-0" / "jtrain.pid").read_text())
    group = [int(p) for p in _children(first.pid) if int(p) != pid]
    for process in group:
        _kill(process)
    first.wait(timeout=30)
    assert Path(f"/proc/{pid}").exists()
    done = cloud.run("gpu_machine.sh", "host", *QUICK, *RUN)
    assert done.returncode == 0, done.stderr
    assert cloud.started == ["one", "saved", "one"]


@pytest.mark.thorough
def test_ctrl_c_stops_the_run_and_leaves_the_slice(tmp_path):
    cloud = Cloud(tmp_path, program=WAITS)
    words = ["bash", str(ROOT / "scripts" / "tpu_vm.sh"), *SLICE, *QUICK, *RUN]
    process = subprocess.Popen(
        words, env=cloud.environ, cwd=cloud.project, stderr=subprocess.PIPE, text=True
    )
    _until(lambda: (cloud.folder / "started").exists())
    pid = int((cloud.folder / "host-0" / "jtrain.pid").read_text())
    # Ctrl-C reaches what is here: the script, and gcloud, but not what runs there.
    process.send_signal(signal.SIGINT)
    for child in _children(process.pid)[1:]:
        if child != pid:
            _kill(child)
    _, said = process.communicate(timeout=60)
    assert process.returncode == 75, said
    assert cloud.started == ["one", "saved"]
    assert "to delete it: gcloud compute tpus queued-resources delete slice" in said
    assert "delete" not in cloud.names()


def _until(done, seconds: float = 30) -> None:
    end = time.monotonic() + seconds
    while not done():
        assert time.monotonic() < end
        time.sleep(0.02)


def _children(pid: int) -> list[int]:
    """Return a process and all below it, except what runs on a host: what jtrain.pid's has."""
    found = [pid]
    for task in Path(f"/proc/{pid}/task").glob("*/children"):
        for child in task.read_text().split():
            found += _children(int(child))
    return found


def _kill(pid: int) -> None:
    subprocess.run(["kill", "-KILL", str(pid)], check=False, capture_output=True)
