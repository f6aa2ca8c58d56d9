"""A command in several processes: they end together, and the one that failed has the last word."""

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from jtrain.cli import main
from jtrain.errors import ConfigError
from jtrain.launch import launch
from jtrain.launch.launch import environment

ME = "import os, sys, time; me = int(os.environ['JTRAIN_PROCESS']);"


def of(code: str) -> list[str]:
    return [sys.executable, "-S", "-c", ME + code]


def gone(file: Path) -> bool:
    """Whether the processes that wrote their numbers there are no more."""
    return not any(Path(f"/proc/{pid}").exists() for pid in file.read_text().split())


def test_each_is_told_its_place_and_the_same_coordinator(tmp_path: Path):
    names = ["JTRAIN_COORDINATOR", "JTRAIN_PROCESSES", "JAX_NUM_CPU_DEVICES", "JAX_PLATFORMS"]
    code = f"open(f'{tmp_path}/{{me}}', 'w').write(' '.join(os.environ[x] for x in {names}))"
    assert launch(of(code), processes=3, devices=4) == 0
    said = {(tmp_path / f"{index}").read_text() for index in range(3)}
    assert len(said) == 1
    coordinator, *others = said.pop().split()
    assert coordinator.startswith("127.0.0.1:")
    assert others == ["3", "4", "cpu"]


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["rum", "configs/x.yaml"], "rum is no verb that it can run; did you mean run?"),
        (["rum", "run", "configs/x.yaml"], "rum is no verb that it can run; did you mean run?"),
        (["configs/x.yaml"], "; did you mean run configs/x.yaml?"),
        (["launch", "run"], "launch is no verb that it can run"),
        ([], "what is to be run in 3 processes? It is a verb"),
    ],
)
def test_a_word_that_is_no_verb_is_named(words: list[str], says: str, capsys):
    assert main(["launch", "--processes", "3", *words]) == 2
    assert says in capsys.readouterr().err


def test_what_the_caller_says_of_platforms_stays():
    assert environment({"JAX_PLATFORMS": "cuda"}, "x:1", 0, 2, 0)["JAX_PLATFORMS"] == "cuda"
    assert "JAX_NUM_CPU_DEVICES" not in environment({}, "x:1", 0, 2, 0)


def test_when_one_fails_all_end_and_its_words_come_last(tmp_path: Path, capfd):
    pids = tmp_path / "pids"
    code = (
        f"open('{pids}', 'a').write(f'{{os.getpid()}} ');"
        "print('hello from', me, flush=True);"
        "me == 2 and time.sleep(0.2);"
        "me == 2 and 1 / 0;"
        "time.sleep(60)"
    )
    began = time.monotonic()
    assert launch(of(code), processes=3) == 1
    assert time.monotonic() - began < 20
    out, err = capfd.readouterr()
    assert out == "hello from 0\n", "the others are quiet"
    assert "hello from 2" in err
    assert "hello from 1" not in err
    *_, error, last = err.splitlines()
    assert error == "ZeroDivisionError: division by zero"
    assert last == "process 2 failed (exit code 1), and all were ended"
    assert len(pids.read_text().split()) == 3
    assert gone(pids)


def test_the_exit_code_is_that_of_the_first_that_failed():
    code = "time.sleep(0.1 * me); sys.exit({0: 0, 1: 70, 2: 2}[me])"
    assert launch(of(code), processes=3) == 70


def test_a_signal_that_ended_one_is_named(capfd):
    code = "me == 1 and os.kill(os.getpid(), 9); time.sleep(60)"
    assert launch(of(code), processes=2) == 128 + 9
    assert capfd.readouterr().err.endswith("process 1 failed (SIGKILL), and all were ended\n")


def test_runs_that_were_stopped_are_waited_for(tmp_path: Path):
    code = f"time.sleep(1.5 * me); open(f'{tmp_path}/{{me}}', 'w'); sys.exit(75)"
    assert launch(of(code), processes=2) == 75
    assert (tmp_path / "1").exists()


def launched(code: str) -> subprocess.Popen:
    starts = (
        f"from jtrain.launch import launch; raise SystemExit(launch({of(code)!r}, processes=2))"
    )
    return subprocess.Popen([sys.executable, "-c", starts], stderr=subprocess.DEVNULL)


def when_written(folder: Path, count: int) -> None:
    deadline = time.monotonic() + 60
    while len(list(folder.iterdir())) < count:
        assert time.monotonic() < deadline
        time.sleep(0.01)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_signals_are_handed_on(tmp_path: Path, number: signal.Signals):
    code = (
        "import signal;"
        f"signal.signal({int(number)}, lambda *_: sys.exit(75));"
        f"open(f'{tmp_path}/{{os.getpid()}}', 'w');"
        "time.sleep(60)"
    )
    process = launched(code)
    when_written(tmp_path, 2)
    process.send_signal(number)
    assert process.wait(timeout=30) == 75
    assert not any(Path(f"/proc/{file.name}").exists() for file in tmp_path.iterdir())


def test_a_second_signal_ends_all(tmp_path: Path):
    code = (
        "import signal;"
        "signal.signal(signal.SIGTERM, signal.SIG_IGN);"
        f"open(f'{tmp_path}/{{os.getpid()}}', 'w');"
        "time.sleep(60)"
    )
    process = launched(code)
    when_written(tmp_path, 2)
    for _ in range(2):
        process.send_signal(signal.SIGTERM)
        time.sleep(0.2)
    assert process.wait(timeout=30) != 0
    assert not any(Path(f"/proc/{file.name}").exists() for file in tmp_path.iterdir())


def test_when_it_is_killed_they_end_too(tmp_path: Path):
    process = launched(f"open(f'{tmp_path}/{{os.getpid()}}', 'w'); time.sleep(60)")
    when_written(tmp_path, 2)
    process.kill()
    process.wait()
    deadline = time.monotonic() + 10
    while any(Path(f"/proc/{file.name}").exists() for file in tmp_path.iterdir()):
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_says_where_more_than_the_loopback_is_listened_at(monkeypatch, capfd):
    found = lambda address: lambda *_, **__: [(0, 0, 0, "", (address, 0))]
    monkeypatch.setattr(socket, "getaddrinfo", found("127.0.1.1"))
    assert launch(of("pass"), processes=2) == 0
    assert capfd.readouterr().err == ""
    monkeypatch.setattr(socket, "getaddrinfo", found("198.51.100.7"))
    assert launch(of("pass"), processes=2) == 0
    said = capfd.readouterr().err
    assert "exchange arrays at 198.51.100.7" in said
    assert f"put `127.0.0.1 {socket.gethostname()}` into /etc/hosts" in said


def test_a_port_in_use_is_refused_with_one_that_is_free():
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError, match=f"--port {port} was asked.*Leave --port out"):
            launch(of("pass"), processes=2, port=port)


def test_it_can_be_used_beside_the_main_thread():
    codes = []
    thread = threading.Thread(target=lambda: codes.append(launch(of("pass"), processes=2)))
    thread.start()
    thread.join(timeout=60)
    assert codes == [0]
    assert os.getpid()
