"""Steps of Slurm, as its own daemons start them: their variables, and the exit codes of `srun`."""

import json
import re

import pytest
from slurm_jobs import Script

pytestmark = pytest.mark.thorough
DETECT = (
    "python -c 'import json, os; from jtrain.distributed.cluster import detect; "
    "print(json.dumps(detect(os.environ).plain()))'"
)


def detected(said: str) -> list[dict]:
    """Return the clusters that the tasks have found, by their index."""
    found = [json.loads(line) for line in said.splitlines() if line.startswith("{")]
    return sorted(found, key=lambda each: each["index"])


STEPS = {
    "two nodes": (["--nodes=2", "--ntasks-per-node=1"], f"srun {DETECT}", 2, "node1"),
    "one node of two": (
        ["--nodes=2", "--ntasks-per-node=2"],
        f"srun -w node2 -N1 -n2 {DETECT}",
        2,
        "node2",
    ),
    "components of a step": (
        ["--nodes=2", "--ntasks-per-node=2"],
        f"srun -n1 -w node1 {DETECT} : -n2 -w node2 {DETECT}",
        3,
        "node1",
    ),
    "components of a job, the first on the second node": (
        ["--ntasks=1", "-w", "node2", ":", "--ntasks=2", "-w", "node1"],
        f"srun --het-group=0,1 {DETECT}",
        3,
        "node2",
    ),
    "one component of a job": (
        ["--ntasks=1", "-w", "node2", ":", "--ntasks=2", "-w", "node1"],
        f"srun --het-group=1 {DETECT}",
        2,
        "node1",
    ),
}


@pytest.mark.parametrize("case", STEPS.values(), ids=STEPS)
def test_every_task_of_a_step_finds_its_index_and_the_first_node(
    script: Script, case: tuple[list[str], str, int, str]
):
    options, step, processes, first = case
    code, said = script(f"echo job $SLURM_JOB_ID\n{step}", *options)
    assert code == 0, said
    found = detected(said)
    assert [each["index"] for each in found] == list(range(processes))
    assert {each["processes"] for each in found} == {processes}
    job = re.search(r"^job (\d+)$", said, re.MULTILINE)
    assert job, said
    assert {each["coordinator"] for each in found} == {f"{first}:{61440 + int(job[1])}"}


def test_an_order_of_nodes_that_slurm_does_not_tell_is_named_by_the_user(script: Script):
    step = f"srun -n1 -w node2 {DETECT} : -n2 -w node1 {DETECT}"
    nodes = ["--nodes=2", "--ntasks-per-node=2"]
    code, said = script(step, *nodes)
    assert code == 1
    assert said.count("not in the order of its tasks") == 3
    advice = re.search(r"(JTRAIN_COORDINATOR=NODE:\d+) srun \.\.\.", said)
    assert advice, said
    address = advice[1].replace("NODE", "node2")
    code, said = script(f"{address} {step}", *nodes)
    assert code == 0, said
    assert [f"JTRAIN_COORDINATOR={x['coordinator']}" for x in detected(said)] == [address] * 3


def test_steps_of_one_job_at_the_same_time_have_ports_of_their_own(script: Script):
    lines = f"srun -n1 --exact {DETECT} &\nsrun -n1 --exact {DETECT} &\nwait"
    code, said = script(lines, "--nodes=1", "--ntasks=2")
    assert code == 0, said
    assert len({each["coordinator"] for each in detected(said)}) == 2


CODES = {
    ("exit 70", "exit 2", ""): 70,
    ("exit 75", "exit 124", ""): 124,
    ("exit 75", "exit 75", "--kill-on-bad-exit=1"): 75,
    ("exit 0", "exit 75", "--kill-on-bad-exit=1"): 75,
    ("kill -KILL $$", "exit 0", ""): 137,
    ("kill -ABRT $$", "exit 70", ""): 134,
    ("sleep 1; kill -KILL $$", "exec sleep 9", "--kill-on-bad-exit=1"): 143,
    ("sleep 1; exit 2", "exec sleep 9", "--kill-on-bad-exit=1"): 143,
    ("sleep 1; exit 2", "trap 'exit 75' TERM; sleep 9 & wait", "--kill-on-bad-exit=1"): 75,
    ("sleep 1; kill -KILL $$", "trap 'exit 70' TERM; sleep 9 & wait", "--kill-on-bad-exit=1"): 137,
}


def test_srun_returns_the_largest_code_of_its_tasks(script: Script):
    lines = [
        f"srun {option} bash -c 'if [ $SLURM_PROCID = 0 ]; then {first}; else {second}; fi'\n"
        f"echo code $?"
        for first, second, option in [
            (first, second.replace("'", '"'), option) for first, second, option in CODES
        ]
    ]
    _, said = script("\n".join(lines), "--nodes=1", "--ntasks=2")
    assert [int(code) for code in re.findall(r"^code (\d+)$", said, re.MULTILINE)] == list(
        CODES.values()
    ), said
