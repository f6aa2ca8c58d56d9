"""Faults of a rehearsal are parsed, and invalid ones are refused with advice."""

import pytest

from jtrain.cli import launch
from jtrain.distributed.heartbeat.fault import KINDS, Fault, parse_faults
from jtrain.distributed.heartbeat.heartbeat import FAULTS
from jtrain.errors import UserError


def test_printed_faults_parse_to_themselves():
    text = "kill:1@step20,stall:0@step30,raise:1@step12,full-disk@save2,term:0@step40"
    found = parse_faults(text, processes=2)
    assert found[0] == Fault("kill", 1, 20)
    assert ",".join(map(str, found)) == text
    assert {fault.kind for fault in found} == set(KINDS)
    assert parse_faults("", processes=2) == ()
    assert parse_faults("kill@step3", processes=1) == (Fault("kill", 0, 3),)


@pytest.mark.parametrize(
    ("text", "why"),
    [
        (
            "kil:1@step20",
            r"has an unknown kind; the kinds are kill, .*; did you mean kill\? For example",
        ),
        ("kill:1", "is not a fault; a fault is KIND:PROCESS@stepN"),
        ("kill:1@step20,", "is not a fault"),
        ("kill:2@step20", "names process 2, and the processes are 0 to 1"),
        ("kill@step20", "names none of the 2 processes: type kill:0@step1"),
        ("kill:0@step0", "counts from 1"),
        ("kill:0@save3", "does not fit: a full disk comes in a save"),
        ("full-disk@step3", "does not fit: a full disk comes in a save"),
    ],
)
def test_an_invalid_fault_is_refused_with_valid_advice(text: str, why: str):
    with pytest.raises(UserError, match=why) as refused:
        parse_faults(text, processes=2)
    *_, advice = str(refused.value).split("--chaos ")
    assert parse_faults(advice, processes=2), "the advice is valid"


def test_only_the_verb_run_takes_faults():
    with pytest.raises(UserError, match="--chaos works only with the verb run") as refused:
        launch.main(["--chaos", "kill:1@step2", "check", "configs/x.yaml"])
    assert "run CONFIG" in str(refused.value)


def test_more_faults_than_fit_into_the_memory_of_a_process_are_refused():
    assert len(parse_faults(",".join(["kill:0@step1"] * FAULTS), processes=1)) == FAULTS
    with pytest.raises(
        UserError, match=f"names {FAULTS + 1} faults, and .* takes {FAULTS}. Rehearse"
    ):
        parse_faults(",".join(["kill:0@step1"] * (FAULTS + 1)), processes=1)
