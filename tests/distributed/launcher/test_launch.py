"""A command in several processes: all end together; the output of the failed one is last."""

import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
from cases import by_name
from plain_environ import until

from jtrain.distributed.launcher import launch, process_group
from jtrain.distributed.port import free_port

ME = "import os, sys, time; me = int(os.environ['JTRAIN_PROCESS']);"


def of(code: str) -> list[str]:
    return [sys.executable, "-S", "-c", ME + code]


def test_each_process_gets_its_index_and_the_same_coordinator(tmp_path: Path):
    names = ["JTRAIN_COORDINATOR", "JTRAIN_TOKEN"]
    names += ["JTRAIN_PROCESSES", "JAX_NUM_CPU_DEVICES", "JAX_PLATFORMS"]
    code = f"open(f'{tmp_path}/{{me}}', 'w').write(' '.join(os.environ[x] for x in {names}))"
    assert launch(of(code), processes=3, devices=4) == 0
    said = {(tmp_path / f"{index}").read_text() for index in range(3)}
    assert len(said) == 1
    coordinator, token, *others = said.pop().split()
    assert len(token) == 32
    assert coordinator.startswith("127.0.0.1:")
    assert others == ["3", "4", "cpu"]


def test_when_one_fails_all_end_and_its_output_comes_last(tmp_path: Path, capfd):
    code = (
        "print('hello from', me, flush=True)\n"
        f"open(f'{tmp_path}/{{os.getpid()}}', 'w')\n"
        f"while me == 2 and len(os.listdir('{tmp_path}')) < 3: time.sleep(0.01)\n"
        "me == 2 and 1 / 0\n"
        "time.sleep(600)"
    )
    began = time.monotonic()
    assert launch(of(code), processes=3) == 1
    assert time.monotonic() - began < 300
    out, err = capfd.readouterr()
    assert out == "hello from 0\n", "the others are quiet"
    assert "hello from 2" in err
    assert "hello from 1" not in err
    *_, error, last = err.splitlines()
    assert error == "ZeroDivisionError: division by zero"
    assert last == "process 2 failed (exit code 1), and all were ended"
    assert len(list(tmp_path.iterdir())) == 3
    assert ended(tmp_path)


def test_the_exit_code_is_that_of_the_first_that_failed(tmp_path: Path):
    first = tmp_path / "first"
    code = (
        f"me == 1 and os.symlink(f'/proc/{{os.getpid()}}', '{first}')\n"
        f"while me == 2 and not os.path.islink('{first}'): time.sleep(0.01)\n"
        f"while me == 2 and os.path.exists('{first}'): time.sleep(0.01)\n"
        "sys.exit({0: 0, 1: 70, 2: 2}[me])"
    )
    assert launch(of(code), processes=3) == 70


def test_the_same_mistake_of_all_is_shown_once(monkeypatch, capfd):
    monkeypatch.setattr(process_group, "FAREWELL", 20.0)
    code = "sys.stderr.write({!r}.format({})); sys.exit(2)"
    mistake = "step={}: is not a key\n"
    assert launch(of(code.format(mistake, 3)), processes=3) == 2
    assert capfd.readouterr().err == f"{mistake.format(3)}all processes failed (exit code 2)\n"
    assert launch(of(code.format(mistake, "me")), processes=2) == 2
    err = capfd.readouterr().err
    assert "is not a key" in err
    assert err.endswith("failed (exit code 2), and all were ended\n")


def launched(code: str, *before: str, **options) -> subprocess.Popen:
    """Launch two processes; a signal within 0.5 s repeats the first one."""
    starts = (
        "from jtrain.distributed import shutdown\n"
        "shutdown.REPEATS = 0.5\n"
        "from jtrain.distributed.launcher import launch; "
        f"raise SystemExit(launch({of(code)!r}, processes=2))"
    )
    options.setdefault("stderr", subprocess.DEVNULL)
    return subprocess.Popen([*before, sys.executable, "-c", starts], **options)


def when_written(folder: Path, count: int) -> None:
    until(lambda: len(list(folder.iterdir())) >= count)


def ended(folder: Path) -> bool:
    """Return whether the processes whose numbers are file names have ended."""
    return not any(Path(f"/proc/{file.name}").exists() for file in folder.iterdir())


@pytest.mark.thorough
def test_a_second_signal_ends_all_and_one_that_repeats_the_first_does_not(tmp_path: Path):
    code = (
        "import signal;"
        "signal.signal(signal.SIGTERM, signal.SIG_IGN);"
        f"open(f'{tmp_path}/{{os.getpid()}}', 'w');"
        "time.sleep(600)"
    )
    said = tmp_path.with_name("said.txt")
    with said.open("w") as stderr:
        process = launched(code, stderr=stderr)
    when_written(tmp_path, 2)
    first, sent = time.time(), 0
    while "second signal (" not in said.read_text():
        assert process.poll() is None
        assert time.time() < first + 120
        process.send_signal(signal.SIGTERM)
        sent += 1
        time.sleep(0.02 if sent < 3 else 0.7)
    assert process.wait(timeout=60) == 75
    assert said.stat().st_mtime > first + 0.4, "those at once repeat the first one"
    assert said.read_text().count("SIGTERM was forwarded to all processes. From 0.5 s on a s") == 1
    assert "second signal (SIGTERM): all are ended at once" in said.read_text()
    assert ended(tmp_path)


@pytest.mark.parametrize(
    "number", by_name(["SIGKILL", "SIGQUIT", "SIGHUP"], ["SIGKILL"], pytest.mark.thorough)
)
def test_the_workers_end_with_the_launcher_and_nothing_is_left(tmp_path: Path, number: str):
    pids, temporary = tmp_path / "pids", tmp_path / "temporary"
    pids.mkdir()
    temporary.mkdir()
    process = launched(
        f"open(f'{pids}/{{os.getpid()}}', 'w'); time.sleep(60)",
        env={**os.environ, "TMPDIR": str(temporary)},
    )
    when_written(pids, 2)
    process.send_signal(signal.Signals[number])
    codes = {"SIGKILL": -9, "SIGQUIT": 128 + 3, "SIGHUP": 75}
    assert process.wait(timeout=200) == codes[number]
    until(lambda: ended(pids))
    assert list(temporary.iterdir()) == []


def test_warns_if_gloo_listens_beyond_the_loopback(monkeypatch, capfd):
    found = lambda address: lambda *_, **__: [(0, 0, 0, "", (address, 0))]
    monkeypatch.setattr(socket, "getaddrinfo", found("127.0.1.1"))
    assert launch(of("pass"), processes=2) == 0
    assert capfd.readouterr().err == ""
    monkeypatch.setattr(socket, "getaddrinfo", found("198.51.100.7"))
    assert launch(of("pass"), processes=2) == 0
    said = capfd.readouterr().err
    assert "exchange arrays at 198.51.100.7" in said
    assert f"put `127.0.0.1 {socket.gethostname()}` into /etc/hosts" in said


def test_each_free_port_is_another():
    assert len({free_port() for _ in range(200)}) == 200
